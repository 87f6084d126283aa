"""Read any host's UNet module into a layout, or refuse with a reason."""
from __future__ import annotations

from torch import nn

from .layout import UNetLayout, UnsupportedUNet
from .read_diffusers import is_diffusers_unet, read_diffusers
from .read_ldm import is_ldm_unet, read_ldm


def read_layout(unet: nn.Module) -> UNetLayout:
    """The layout of a UNet module, read from its module tree.

    Raises UnsupportedUNet, whose message is one line for the user, for anything that is not a UNet of the Stable
    Diffusion kind with parameters that we all know.
    """
    kind = type(unet)
    try:
        if is_ldm_unet(unet):
            return read_ldm(unet)
        if is_diffusers_unet(unet):
            return read_diffusers(unet)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        # A member that every UNet of this class has is missing or of another kind: not the network we know.
        raise UnsupportedUNet(f"this {kind.__name__} is built differently from those we know ({error})") from error
    raise UnsupportedUNet(f"{kind.__module__}.{kind.__qualname__} is not a UNet that OneDiff knows")

"""Read any host's UNet, VAE decoder or VAE encoder into a layout, or refuse with a reason.

The one door to the readers of each kind of module, which know nothing of each other.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from .layout import UNetLayout, UnsupportedUNet
from .read_diffusers import is_diffusers_unet, read_diffusers
from .read_ldm import is_ldm_unet, read_ldm
from .vae import read as vae
from .vae.layout import DecoderLayout

Layout = TypeVar("Layout")


def read_layout(unet: nn.Module) -> UNetLayout:
    """The layout of a UNet module, read from its module tree.

    Raises UnsupportedUNet for anything that is not a UNet of the Stable Diffusion kind with parameters that we all
    know.
    """
    return read(unet, "UNet", ((is_ldm_unet, read_ldm), (is_diffusers_unet, read_diffusers)))


def read_decoder(decoder: nn.Module) -> DecoderLayout:
    """The layout of a VAE's decoder or encoder, read from its module tree.

    Raises UnsupportedUNet for anything that is neither of an AutoencoderKL with parameters that we all know: a tiny
    autoencoder, a video decoder, one that takes a mask.
    """
    return read(decoder, "VAE decoder", ((vae.is_ldm, vae.read_ldm), (vae.is_diffusers, vae.read_diffusers)))


def read(
    module: nn.Module, what: str, readers: tuple[tuple[Callable[[Any], bool], Callable[[Any], Layout]], ...]
) -> Layout:
    """By the first of these pairs whose first half knows the module."""
    kind = type(module)
    try:
        for knows, reader in readers:
            if knows(module):
                return reader(module)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        # A member that every module of this class has is missing or of another kind: not the network we know.
        raise UnsupportedUNet(f"this {kind.__name__} is built differently from those we know ({error})") from error
    raise UnsupportedUNet(f"{kind.__module__}.{kind.__qualname__} is not a {what} that OneDiff knows")

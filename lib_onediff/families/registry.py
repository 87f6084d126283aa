"""Read any host's UNet, VAE decoder or VAE encoder into a layout, or refuse with a reason.

The one door to the readers of each kind of module, which know nothing of each other.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from ..core.refusal import Refusal
from .unet.layout import UNetLayout
from .unet.read_diffusers import is_diffusers_unet, read_diffusers
from .unet.read_ldm import is_ldm_unet, read_ldm
from .vae import read_diffusers as vae_diffusers
from .vae import read_ldm as vae_ldm
from .vae.layout import DecoderLayout

Layout = TypeVar("Layout")


def read_layout(unet: nn.Module) -> UNetLayout:
    """The layout of a UNet module, read from its module tree.

    Raises Refusal for anything that is not a UNet of the Stable Diffusion kind with parameters that we all
    know.
    """
    return read(unet, "UNet", ((is_ldm_unet, read_ldm), (is_diffusers_unet, read_diffusers)))


def read_decoder(decoder: nn.Module) -> DecoderLayout:
    """The layout of a VAE's decoder or encoder, read from its module tree.

    Raises Refusal for anything that is neither of an AutoencoderKL with parameters that we all know: a tiny
    autoencoder, a video decoder, one that takes a mask.
    """
    return read(decoder, "VAE decoder", (
        (vae_ldm.is_ldm_decoder, vae_ldm.read_ldm), (vae_diffusers.is_diffusers_decoder, vae_diffusers.read_diffusers),
        (vae_ldm.is_ldm_encoder, vae_ldm.read_ldm_encoder),
        (vae_diffusers.is_diffusers_encoder, vae_diffusers.read_diffusers_encoder),
    ))


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
        raise Refusal(f"this {kind.__name__} is built differently from those we know ({error})") from error
    raise Refusal(f"{kind.__module__}.{kind.__qualname__} is not a {what} that OneDiff knows")

"""Read any host's VAE decoder or encoder into a layout, or refuse with a reason."""
from __future__ import annotations

from torch import nn

from ..layout import UnsupportedUNet
from .layout import DecoderLayout
from .read_diffusers import is_diffusers_decoder, is_diffusers_encoder, read_diffusers, read_diffusers_encoder
from .read_ldm import is_ldm_decoder, is_ldm_encoder, read_ldm, read_ldm_encoder


class UnsupportedDecoder(UnsupportedUNet):
    """The module is not a VAE decoder that we can run; the message is one line for the user."""


def read_decoder(decoder: nn.Module) -> DecoderLayout:
    """The layout of a VAE's decoder or encoder, read from its module tree.

    Raises UnsupportedUNet, whose message is one line for the user, for anything that is neither of an
    AutoencoderKL with parameters that we all know: a tiny autoencoder, a video decoder, one that takes a mask.
    """
    kind = type(decoder)
    try:
        if is_ldm_decoder(decoder):
            return read_ldm(decoder)
        if is_diffusers_decoder(decoder):
            return read_diffusers(decoder)
        if is_ldm_encoder(decoder):
            return read_ldm_encoder(decoder)
        if is_diffusers_encoder(decoder):
            return read_diffusers_encoder(decoder)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        # A member that every decoder of this class has is missing or of another kind: not the network we know.
        raise UnsupportedDecoder(f"this {kind.__name__} is built differently from those we know ({error})") from error
    raise UnsupportedDecoder(f"{kind.__module__}.{kind.__qualname__} is not a VAE decoder that OneDiff knows")

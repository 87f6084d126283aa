"""What a VAE's decoder or encoder is: a row of layers that says which parameter does what, without holding any.

The same row describes ldm's, sgm's, Forge's and diffusers' modules; read.py fills it in.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...core.leaves import Convolution, FusedLinear, GroupNorm, LayerNorm, Linear, descriptions, digest_without
from ..unet.layout import Downsample, Upsample


@dataclass(frozen=True)
class ResidualBlock:
    """As the UNet's, but nothing is embedded between the two convolutions."""

    in_norm: GroupNorm
    in_convolution: Convolution
    out_norm: GroupNorm
    out_convolution: Convolution
    skip: Linear | None


@dataclass(frozen=True)
class PixelAttention:
    """Every pixel attends to every pixel; the result is added to the image. projections: of queries, keys and values.
    """

    norm: GroupNorm
    projections: tuple[Linear, ...]
    out: Linear
    heads: int


# Downsample: unlike the UNet's, the image gets a row and a column of zeros, below and to the right.
Layer = ResidualBlock | PixelAttention | Upsample | Downsample


@dataclass(frozen=True)
class DecoderLayout:
    """The whole network: a convolution, layers one after the other, a norm with SiLU, a convolution.

    An encoder is one too: what it takes is an image, and what it makes the mean and the spread of a latent.
    """

    family: str
    in_convolution: Convolution
    layers: tuple[Layer, ...]
    out_norm: GroupNorm
    out_convolution: Convolution

    @property
    def model_name(self) -> str:
        """A name for people; nothing depends on it."""
        return "VAE encoder" if self.encodes else "VAE decoder"

    @property
    def encodes(self) -> bool:
        """Whether it makes latents of images."""
        return self.reduction > 1

    @property
    def reduction(self) -> int:
        """How many pixels wide a pixel of its output is; 1 for a decoder."""
        return 1 << sum(isinstance(layer, Downsample) for layer in self.layers)

    def leaves(self) -> list[Linear | Convolution | GroupNorm | LayerNorm]:
        """Every description of a module that holds parameters, each once."""
        parts = (self.in_convolution, self.layers, self.out_norm, self.out_convolution)
        return list(descriptions(parts, (Linear, Convolution, GroupNorm, LayerNorm)))

    @property
    def kernel_users(self) -> list[Linear | Convolution | GroupNorm | LayerNorm]:
        """Every description that decides which kernels are needed."""
        return self.leaves()

    def fusions(self) -> list[FusedLinear]:
        """Nothing needs to lie together: the few linear layers are a hundredth of the work."""
        return []

    @cached_property
    def architecture(self) -> str:
        """A digest that two decoders share exactly when they are the same network up to their weights and names."""
        return digest_without(self, ("path", "family", "resize_before"))

"""What one call of a UNet is, whichever host makes it."""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .additions import FreeU, ImagePrompt, PerturbedAttention, Shrink
from .patch_points import PatchPoints

FULL, CACHED = "full", "cached"


class DeepFeature:
    """A deep feature, (batch, channels, height, width), in memory that stays where it is as long as the shape does: a
    captured graph knows the address alone."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def write(self, image: Tensor) -> None:
        """Keep what is in image. Raises RuntimeError if memory for it would be needed during a capture."""
        kept = self.tensor
        if kept is None or (kept.shape, kept.dtype, kept.device) != (image.shape, image.dtype, image.device):
            if image.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("a deep feature must have its memory before a graph writes it")
            self.tensor = kept = torch.empty_like(image)
        kept.copy_(image)

    def read(self) -> Tensor:
        """The feature, as a tensor of its own: what operators know of an image, they must not know of the next one in
        the same memory. Raises RuntimeError before the first write."""
        if self.tensor is None:
            raise RuntimeError("no deep feature has been written yet")
        return self.tensor.detach()

    @property
    def bytes(self) -> int:
        return 0 if self.tensor is None else self.tensor.nbytes


@dataclass(frozen=True)
class DeepCachePass:
    """The full pass computes everything and writes the feature; the cached pass reads it. depth: see deepcache/."""

    depth: int
    is_cached_pass: bool
    feature: DeepFeature

    @property
    def name(self) -> str:
        return CACHED if self.is_cached_pass else FULL

    def apart(self) -> DeepCachePass:
        """The same pass, writing its feature to memory that no other pass reads."""
        return self if self.is_cached_pass else replace(self, feature=DeepFeature())


@dataclass(frozen=True)
class Control:
    """Residuals from a ControlNet or T2I adapter, each (batch, channels, height, width) or None.

    input[i] is added to what input stage i returns (so the stages after it and its skip both see it), every residual
    of middle to what the middle stage returns, output[i] to the skip that output stage i takes. A tuple may be
    shorter than the number of stages.
    """

    input: tuple[Tensor | None, ...] = ()
    middle: tuple[Tensor | None, ...] = ()
    output: tuple[Tensor | None, ...] = ()


@dataclass(frozen=True)
class UNetCall:
    """The inputs of one denoising call.

    latent: (batch, channels, height, width), in latent pixels.
    timestep: (batch,), float or integer, in training steps (0 to 1000; may be fractional).
    context: (batch, tokens, width): the text encoder's output.
    y: (batch, width) pooled text and size embedding of SDXL-like models, else None.
    timestep_condition: (batch, width) guidance embedding of LCM-distilled models, else None.
    control: residuals to add, else None.
    upcast_attention: compute attention scores in float32 (SD2.1 overflows in float16).
    deepcache: which pass of DeepCache is wanted, None for the whole UNet.
    patches: functions of other extensions that run within it, else None.
    image_prompts, freeu, perturbed, shrink: what is put on the UNet for this call and computed by our forward.
    """

    latent: Tensor
    timestep: Tensor
    context: Tensor
    y: Tensor | None = None
    timestep_condition: Tensor | None = None
    control: Control | None = None
    upcast_attention: bool = False
    deepcache: DeepCachePass | None = None
    patches: PatchPoints | None = None
    image_prompts: tuple[ImagePrompt, ...] = ()
    freeu: FreeU | None = None
    perturbed: PerturbedAttention | None = None
    shrink: Shrink | None = None

    @property
    def additions(self) -> tuple[str, ...]:
        """What our forward computes besides the UNet's own layers; equal for calls that compute the same way."""
        present = (*self.image_prompts, self.freeu, self.perturbed, self.shrink)
        return tuple(addition.structure for addition in present if addition is not None)

"""What one call of a UNet is, whichever host makes it."""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .patch_points import PatchPoints

FULL, CACHED = "full", "cached"


class CutMemory:
    """What crosses a cut, hidden states (batch, channels, height, width), in memory that stays where it is as long as
    the shape does: a captured graph knows the address alone."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def write(self, hidden_states: Tensor) -> None:
        """Keep these. Raises RuntimeError if memory for them would be needed during a capture."""
        kept = self.tensor
        wanted = hidden_states.shape, hidden_states.dtype, hidden_states.device
        if kept is None or (kept.shape, kept.dtype, kept.device) != wanted:
            if hidden_states.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("a cut must have its memory before a graph writes it")
            self.tensor = kept = torch.empty_like(hidden_states)
        kept.copy_(hidden_states)

    def read(self) -> Tensor:
        """The hidden states, as a tensor of its own: what operators know of these, they must not know of the next in
        the same memory. Raises RuntimeError before the first write."""
        if self.tensor is None:
            raise RuntimeError("nothing has been written at this cut yet")
        return self.tensor.detach()

    @property
    def bytes(self) -> int:
        return 0 if self.tensor is None else self.tensor.nbytes


@dataclass(frozen=True)
class Cut:
    """The network cut in two: the inner part, and the outer stages around it.

    depth: how many input stages, and as many output stages, are the outer part. reads: compute the outer part alone,
    around what an earlier call has written to memory; otherwise compute everything, and write it. edition: of the
    weights that have written what is read (BoundUNet.edition).
    """

    depth: int
    reads: bool
    memory: CutMemory
    edition: int = -1

    @property
    def name(self) -> str:
        return CACHED if self.reads else FULL


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

    @property
    def shapes(self) -> tuple[tuple[int, ...] | None, ...]:
        """The shape of every residual in slot order, None where a slot is empty, and () after each of the three parts.
        """
        parts: tuple[tuple[Tensor | None, ...], ...] = (self.input, self.middle, self.output)
        return tuple(
            shape for part in parts
            for shape in (*(None if residual is None else tuple(residual.shape) for residual in part), ())
        )


@dataclass(frozen=True)
class ImagePrompt:
    """What an IP-Adapter (Ye et al. 2023, arXiv 2308.06721) adds to cross attentions: a second attention, from the same
    queries to the tokens of an image.

    key_values: (batch, tokens, sum of the widths of all parts); of each part keys, then values. The adapter's scale is
    a factor of the values.
    parts: first column and width of each cross attention's part, by the path of its query.
    """

    key_values: Tensor
    parts: Mapping[str, tuple[int, int]]

    def key_value(self, query_path: str) -> tuple[Tensor, Tensor] | None:
        """Keys and values for a cross attention, (batch, tokens, width) each; None where the adapter leaves it
        alone."""
        part = self.parts.get(query_path)
        if part is None:
            return None
        key, value = self.key_values.narrow(-1, *part).chunk(2, dim=-1)
        return key, value

    def map(self, change: Callable[[Tensor], Tensor]) -> ImagePrompt:
        """The same with change(key_values)."""
        return replace(self, key_values=change(self.key_values))

    @cached_property
    def structure(self) -> str:
        which = hashlib.sha256("\n".join(sorted(self.parts)).encode()).hexdigest()[:8]
        return f"an image prompt of {self.key_values.shape[1]} tokens in {len(self.parts)} attentions ({which})"


@dataclass(frozen=True)
class Call:
    """The inputs of one denoising call.

    latent: (batch, channels, height, width), in latent pixels; (batch, channels, 1, height, width) of a network that is
        for videos too.
    timestep: (batch,), float or integer, from 0 to Family.first_timestep; may be fractional.
    context: (batch, tokens, width): the text encoder's output.
    y: (batch, width) pooled text and size embedding of SDXL-like models, else None.
    timestep_condition: (batch, width) guidance embedding of LCM-distilled models, else None.
    control: residuals to add, else None.
    upcast_attention: compute attention scores in float32 (SD2.1 overflows in float16).
    cut: where the UNet is cut in two for this call, else None.
    patches: functions of other extensions that run within it, else None.
    image_prompts: what IP-Adapters add.
    """

    latent: Tensor
    timestep: Tensor
    context: Tensor
    y: Tensor | None = None
    timestep_condition: Tensor | None = None
    control: Control | None = None
    upcast_attention: bool = False
    cut: Cut | None = None
    patches: PatchPoints | None = None
    image_prompts: tuple[ImagePrompt, ...] = ()

    @property
    def additions(self) -> tuple[str, ...]:
        """What our forward computes besides the UNet's own layers; equal for calls that compute the same way."""
        return tuple(prompt.structure for prompt in self.image_prompts)

    @property
    def signature(self) -> Hashable:
        """What tells calls of one UNet apart by their inputs' shapes and types; microseconds."""
        latent, y, condition, cut = self.latent, self.y, self.timestep_condition, self.cut
        return (
            latent.shape, latent.dtype, self.timestep.shape, self.context.shape, y is None or y.shape,
            condition is None or condition.shape, self.control.shapes if self.control else (),
            self.upcast_attention, self.additions, cut and (cut.depth, cut.reads),
        )

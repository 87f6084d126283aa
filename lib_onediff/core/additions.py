"""What users put on a UNet that our forward computes itself: image prompts and FreeU."""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


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
        """The same with change(key_values) in their place."""
        return replace(self, key_values=change(self.key_values))

    @cached_property
    def structure(self) -> str:
        tokens = self.key_values.shape[1]
        return f"an image prompt of {tokens} tokens in {len(self.parts)} attentions ({digest(self.parts)})"


@dataclass(frozen=True)
class FreeU:
    """FreeU (Si et al. 2023, arXiv 2309.11497): output stages amplify half of their channels and weaken the low
    frequencies of their skips.

    factors: (output stages, 2) in float32: of the backbone and of the skip.
    stages: the output stages where it works.
    """

    factors: Tensor
    stages: frozenset[int]

    def apply(self, index: int, hidden_states: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        """What an output stage joins, (batch, channels, height, width) each, as new tensors."""
        if index not in self.stages:
            return hidden_states, skip
        backbone, low = self.factors[index]
        half = hidden_states.shape[1] // 2
        amplified = (hidden_states[:, :half].float() * backbone).to(hidden_states.dtype)
        return torch.cat([amplified, hidden_states[:, half:]], dim=1), with_low_frequencies(skip, low)

    @cached_property
    def structure(self) -> str:
        return f"FreeU at stages {', '.join(map(str, sorted(self.stages)))}"


def with_low_frequencies(skip: Tensor, factor: Tensor) -> Tensor:
    """The skip with its lowest frequencies, 0 and -1 in each direction, times a factor.

    The real part of what a Fourier transform, a mask and the transform back make. Four frequencies are eight inner
    products, so two small matrix products do: any size, and nothing that a CUDA graph cannot record.
    """
    height, width = skip.shape[-2:]
    waves = lowest_waves(height, width, skip.device)
    flat = skip.float().flatten(2)
    low = (flat @ waves.t()) @ waves
    return (flat + (factor - 1) / (height * width) * low).to(skip.dtype).view(skip.shape)


def lowest_waves(height: int, width: int, device: torch.device) -> Tensor:
    """Cosines and sines of the frequencies 0 and -1 in each direction: (8 or fewer, height * width), in float32."""
    vertical, horizontal = (
        torch.arange(side, device=device, dtype=torch.float32) * (2 * torch.pi / side) for side in (height, width)
    )
    phases = torch.stack([
        (row * vertical)[:, None] + (column * horizontal)[None]
        for row in range(min(height, 2)) for column in range(min(width, 2))
    ]).flatten(1)
    return torch.cat([phases.cos(), phases.sin()])


def digest(names: Collection[str]) -> str:
    """What tells one set of layers from another, in eight letters."""
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:8]

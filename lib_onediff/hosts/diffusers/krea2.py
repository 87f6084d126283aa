"""A call of diffusers' Krea2Transformer2DModel as ours."""
from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...core.call import Call
from ...core.refusal import Refusal
from ...families.krea2.call import Krea2Call

# Of the packed latents: the pipeline's patches.
PATCH = 2
UNSCALED: tuple[dict[str, float], ...] = ({}, {"scale": 1.0})


class Krea2Calls:
    """Makes our calls of one network's: the latent of an image, of tokens in which its patches are packed.

    The tokens' positions are an input of the call. Only what people see as the image's size follows from the numbers in
    them, which are read once for each tensor.
    """

    def __init__(self) -> None:
        self._positions: weakref.ref[Tensor] | None = None
        self._grid = 0, 0

    def __call__(
        self, network: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, timestep: Tensor,
        position_ids: Tensor, encoder_attention_mask: Tensor | None = None,
        attention_kwargs: dict[str, Any] | None = None, **others: Any,
    ) -> Krea2Call:
        """Raises Refusal for what ours does not take."""
        passed = [name for name, value in others.items() if value is not None]
        if (attention_kwargs or {}) not in UNSCALED:
            passed.append("attention_kwargs")
        if passed:
            raise Refusal(f"the pipeline passes {', '.join(passed)}")
        given = hidden_states, encoder_hidden_states, timestep, position_ids
        if not all(isinstance(one, Tensor) for one in given):
            raise Refusal("the latent, the timestep, the context or the positions are no tensor")
        if hidden_states.dim() != 3 or encoder_hidden_states.dim() != 4 or position_ids.dim() != 2:
            shapes = [tuple(one.shape) for one in given]
            raise Refusal(f"latent, context, timestep and positions are {', '.join(map(str, shapes))}")
        rows, columns = self._grid_of(position_ids, hidden_states.shape[1])
        return Krea2Call(
            image_of(hidden_states, rows, columns), timestep, encoder_hidden_states.flatten(2), encoder_attention_mask,
            position_ids[None],
        )

    def _grid_of(self, positions: Tensor, tokens: int) -> tuple[int, int]:
        """How many rows and columns of patches the last so many positions are of; one row where they are no grid."""
        known = None if self._positions is None else self._positions()
        if known is not positions:
            last = positions[-1:].float().cpu().flatten().tolist()
            self._positions = weakref.ref(positions)
            self._grid = int(last[-2]) + 1, int(last[-1]) + 1
        rows, columns = self._grid
        return (rows, columns) if rows * columns == tokens else (1, tokens)


def image_of(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """(batch, rows * columns, channels * 4) -> (batch, channels, 2 * rows, 2 * columns)."""
    return functional.pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (rows, columns)), PATCH)


def tensor_of(sample: Tensor, call: Call) -> Tensor:
    """The network's sample as our output of a call."""
    height, width = call.latent.shape[-2:]
    return image_of(sample, height // PATCH, width // PATCH)


def sample_of(output: Tensor) -> Tensor:
    """Our output as the network's sample."""
    packed: Tensor = functional.pixel_unshuffle(output, PATCH).flatten(2).transpose(1, 2)
    return packed.contiguous(memory_format=torch.contiguous_format)

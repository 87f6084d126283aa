"""Converts a call of diffusers' Krea2Transformer2DModel to ours, and our output to the host's sample."""
from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...core.call import Call
from ...core.refusal import Refusal
from ...families.krea2.call import Krea2Call

# The pipeline packs a latent's patches of this height and width into tokens.
PATCH = 2
# The attention_kwargs that have no effect.
UNSCALED: tuple[dict[str, float], ...] = ({}, {"scale": 1.0})


class Krea2Calls:
    """Converts the calls of one network. The host's latent is tokens, each a packed patch; ours is an image.

    Both calls have the tokens' positions as a tensor, for the rotary embedding. On the CPU, we need the height and
    width of the image, which only the last position tells. Reading it waits for the GPU, so it is read once for each
    tensor of positions, and the result is kept.
    """

    def __init__(self) -> None:
        self._positions: weakref.ref[Tensor] | None = None
        self._grid = 0, 0

    def __call__(
        self, network: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, timestep: Tensor,
        position_ids: Tensor, encoder_attention_mask: Tensor | None = None,
        attention_kwargs: dict[str, Any] | None = None, **others: Any,
    ) -> Krea2Call:
        """Our call for these arguments of the host's forward. Raises Refusal for arguments that our forward does not
        compute."""
        passed = [name for name, value in others.items() if value is not None]
        if (attention_kwargs or {}) not in UNSCALED:
            passed.append("attention_kwargs")
        if passed:
            raise Refusal(f"the diffusers pipeline passes {', '.join(passed)}, which OneDiff does not support")
        given = hidden_states, encoder_hidden_states, timestep, position_ids
        if not all(isinstance(one, Tensor) for one in given):
            raise Refusal("the latent, the timestep, the prompt or the positions are not a tensor")
        if hidden_states.dim() != 3 or encoder_hidden_states.dim() != 4 or position_ids.dim() != 2:
            shapes = [tuple(one.shape) for one in given]
            raise Refusal(f"latent, prompt, timestep and positions have the wrong shapes {', '.join(map(str, shapes))}")
        rows, columns = self._grid_of(position_ids, hidden_states.shape[1])
        return Krea2Call(
            image_of(hidden_states, rows, columns), timestep, encoder_hidden_states.flatten(2), encoder_attention_mask,
            position_ids[None],
        )

    def _grid_of(self, positions: Tensor, tokens: int) -> tuple[int, int]:
        """(rows, columns) of the image's patches. They follow from the last position, which is the image's lower right
        patch.

        positions: (tokens of prompt and image, 3); the image's tokens come last, row by row. tokens: the number of the
            image's. If rows * columns is another number, the tokens are taken as one row: (1, tokens).
        """
        known = None if self._positions is None else self._positions()
        if known is not positions:
            last = positions[-1:].float().cpu().flatten().tolist()
            self._positions = weakref.ref(positions)
            self._grid = int(last[-2]) + 1, int(last[-1]) + 1
        rows, columns = self._grid
        return (rows, columns) if rows * columns == tokens else (1, tokens)


def image_of(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """Unpacks tokens to an image: (batch, rows * columns, channels * 4) to (batch, channels, 2 * rows, 2 * columns)."""
    return functional.pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (rows, columns)), PATCH)


def tensor_of(sample: Tensor, call: Call) -> Tensor:
    """The sample that the host's forward has returned, as an image of the size of call.latent, which is the shape of
    our output: so both can be compared. The host's sample is packed tokens."""
    height, width = call.latent.shape[-2:]
    return image_of(sample, height // PATCH, width // PATCH)


def sample_of(output: Tensor) -> Tensor:
    """Our output, an image, as the host's sample: packed tokens."""
    packed: Tensor = functional.pixel_unshuffle(output, PATCH).flatten(2).transpose(1, 2)
    return packed.contiguous(memory_format=torch.contiguous_format)

"""Converts a call of diffusers' Krea2Transformer2DModel to ours, and our output to the host's sample."""
from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...core.call import Call
from ...core.refusal import Refusal, unsupported_inputs
from ...families.krea2.call import Krea2Call

# The pipeline packs a latent's patches of this height and width into tokens.
PATCH = 2
# The attention_kwargs with which the host's forward computes the same as without any.
UNSCALED: tuple[dict[str, float], ...] = ({}, {"scale": 1.0})


class Krea2Calls:
    """Converts the calls of one network. The host's latent is tokens, each a packed patch; ours is an image.

    Both calls have the tokens' positions as a tensor, for the rotary embedding. To unpack the tokens, we also need the
    image's height and width as numbers. They follow from the last position. Reading it waits for the GPU, so the result
    is kept as long as calls pass the same tensor object of positions, as a pipeline's steps do.
    """

    def __init__(self) -> None:
        self._positions: weakref.ref[Tensor] | None = None
        self._grid = 0, 0

    def __call__(
        self, network: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, timestep: Tensor,
        position_ids: Tensor, encoder_attention_mask: Tensor | None = None,
        attention_kwargs: dict[str, Any] | None = None, **others: Any,
    ) -> Krea2Call:
        """Our Call for these arguments of Krea2Transformer2DModel.forward. Its latent is unpacked, the prompt's text
        layers are concatenated in the width of its context, and its positions have a batch of one. Raises Refusal for
        arguments that our forward does not compute.

        network: not used; every call_of takes it.
        hidden_states: the packed latent, (batch, image tokens, channels * 4).
        encoder_hidden_states: the prompt, (batch, prompt tokens, text layers, width).
        position_ids: (tokens of prompt and image, 3).
        encoder_attention_mask: which of the prompt's tokens count; passed on as it is. None: all.
        attention_kwargs: refused unless in UNSCALED. others: refused unless None.
        """
        passed = [name for name, value in others.items() if value is not None]
        if (attention_kwargs or {}) not in UNSCALED:
            passed.append("attention_kwargs")
        if passed:
            raise Refusal(f"the diffusers pipeline passes {', '.join(passed)}, which OneDiff does not support")
        given = hidden_states, encoder_hidden_states, timestep, position_ids
        if not all(isinstance(one, Tensor) for one in given):
            raise unsupported_inputs("the latent, the timestep, the prompt or the positions are not a tensor")
        if hidden_states.dim() != 3 or encoder_hidden_states.dim() != 4 or position_ids.dim() != 2:
            shapes = [tuple(one.shape) for one in given]
            raise unsupported_inputs(
                f"latent, prompt, timestep and positions have the wrong shapes {', '.join(map(str, shapes))}"
            )
        rows, columns = self._grid_of(position_ids, hidden_states.shape[1])
        return Krea2Call(
            image_of(hidden_states, rows, columns), timestep, encoder_hidden_states.flatten(2), encoder_attention_mask,
            position_ids[None],
        )

    def _grid_of(self, positions: Tensor, tokens: int) -> tuple[int, int]:
        """(rows, columns) of the image's patches. They follow from the last position, which is that of the image's
        lower right patch. If they do not fit the number of tokens, (1, tokens): one row of patches.

        positions: (tokens of prompt and image, 3), with row and column last; the image's tokens come last, row by row.
        tokens: the number of the image's tokens.
        """
        known = None if self._positions is None else self._positions()
        if known is not positions:
            last = positions[-1:].float().cpu().flatten().tolist()
            self._positions = weakref.ref(positions)
            self._grid = int(last[-2]) + 1, int(last[-1]) + 1
        rows, columns = self._grid
        return (rows, columns) if rows * columns == tokens else (1, tokens)


def image_of(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """The image that these tokens are the packed patches of: (batch, rows * columns, channels * 4) becomes
    (batch, channels, 2 * rows, 2 * columns). rows, columns: of patches."""
    return functional.pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (rows, columns)), PATCH)


def tensor_of(sample: Tensor, call: Call) -> Tensor:
    """The sample that the host's forward has returned, unpacked to the shape of our output, so that both can be
    compared. sample: packed tokens, (batch, tokens, channels * 4). call: gives the height and width."""
    height, width = call.latent.shape[-2:]
    return image_of(sample, height // PATCH, width // PATCH)


def sample_of(output: Tensor) -> Tensor:
    """Our output, (batch, channels, height, width), packed as the host returns it: contiguous tokens,
    (batch, tokens, channels * 4)."""
    packed: Tensor = functional.pixel_unshuffle(output, PATCH).flatten(2).transpose(1, 2)
    return packed.contiguous(memory_format=torch.contiguous_format)

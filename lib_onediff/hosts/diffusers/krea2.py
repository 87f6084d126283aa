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
# The host's forward computes the same with these attention_kwargs as without any.
UNSCALED: tuple[dict[str, float], ...] = ({}, {"scale": 1.0})


class Krea2Calls:
    """Converts the calls of one network. The host's latent is tokens, each a packed patch; ours is an image.

    The host's call and ours have the tokens' positions as a tensor, for the rotary embedding. To unpack the tokens, we
    also need the image's height and width as numbers. They follow from the last position. Reading that position waits
    for the GPU, so height and width are kept until a call passes another tensor object of positions. All steps of an
    image pass the same object.
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
        timestep: passed on as it is.
        position_ids: (tokens of prompt and image, 3).
        encoder_attention_mask: which of the prompt's tokens count; passed on as it is. None: all.
        attention_kwargs: refused unless None or in UNSCALED. others: refused unless None.
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
        """(rows, columns) of the image's patches. They follow from the last position, which belongs to the image's
        lower right patch. If rows * columns is not the number of tokens, (1, tokens): one row of patches. The output is
        right for every grid of that many patches, because sample_of packs them in the order in which image_of unpacks.

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
    """The image whose patches are packed in these tokens, row by row: (batch, rows * columns, channels * 4) becomes
    (batch, channels, 2 * rows, 2 * columns). rows, columns: of patches."""
    return functional.pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (rows, columns)), PATCH)


def tensor_of(sample: Tensor, call: Call) -> Tensor:
    """The sample that the host's forward has returned, unpacked to the shape of our output, so that the two
    can be compared. sample: packed tokens, (batch, tokens, channels * 4). call: its latent has the height and width."""
    height, width = call.latent.shape[-2:]
    return image_of(sample, height // PATCH, width // PATCH)


def sample_of(output: Tensor) -> Tensor:
    """Our output, (batch, channels, height, width), packed as the host returns it: contiguous tokens,
    (batch, tokens, channels * 4)."""
    packed: Tensor = functional.pixel_unshuffle(output, PATCH).flatten(2).transpose(1, 2)
    return packed.contiguous(memory_format=torch.contiguous_format)

"""Tells the calls of a sampling apart by their shape and prompt: a step may have several calls."""
from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.call import Call
from ..core.edits import UNCOUNTED, edit_counts
from ..core.refusal import Refusal

TILES = "an extension calls the UNet several times a step with the same prompt (tiles?)"
# The number of prompts of one sampling that are remembered, the newest; scheduled and alternating words make several.
MOST_PROMPTS = 32


class SeenPrompt(NamedTuple):
    """A prompt that a call has had.

    number: from 0, in the order of the first calls.
    objects: the host's tensors of it.
    edits: torch's numbers of in-place edits of these tensors at that call.
    content: copies of the tensors at that call.
    """

    number: int
    objects: list[weakref.ref[Tensor]]
    edits: list[int]
    content: list[Tensor]

    def is_same(self, tensors: list[Tensor]) -> bool:
        """Whether these are the same tensor objects, without an edit that torch counts. Does not wait for the GPU."""
        is_unedited = UNCOUNTED not in self.edits and self.edits == edit_counts(tensors)
        return is_unedited and all(known() is tensor for known, tensor in zip(self.objects, tensors, strict=True))

    def is_equal(self, tensors: list[Tensor]) -> bool:
        """Whether these tensors have the same values. Waits for the GPU."""
        return len(tensors) == len(self.content) and all(map(same_values, self.content, tensors))


class Prompts:
    """The prompts of a sampling, numbered. A prompt that is edited during the sampling gets another number.

    Calls of a step with the same prompt and shape are taken for the several calls of a second-order sampler (Heun).
    They may as well be tiles of the image, computed one by one by an extension. These are recognised at the first
    timestep of the sampling, at which a sampler makes one call for each prompt. Later timesteps may have two: a Heun
    step ends at the timestep at which the next one begins.
    """

    def __init__(self) -> None:
        self._prompts: list[SeenPrompt] = []
        self._numbers = itertools.count()
        self._first_time: float | None = None
        self._at_first: set[Hashable] = set()
        self._has_tiles = False

    def identify(self, call: Call, time: float) -> tuple[Hashable, int]:
        """The signature of a call and the number of its prompt. time: its timestep.

        Compares the prompt's tensors with those of earlier calls, which waits for the GPU unless they are the same
        objects. Raises Refusal if the calls may be tiles.
        """
        found = call.signature, self._number(list(call.prompt))
        if self._first_time is None:
            self._first_time = time
        if time == self._first_time:
            self._has_tiles = self._has_tiles or found in self._at_first
            self._at_first.add(found)
        if self._has_tiles:
            raise Refusal(TILES)
        return found

    def _number(self, tensors: list[Tensor]) -> int:
        """The number of the prompt with these tensors, a new one if none is equal. Waits for the GPU unless the tensors
        are the objects of an earlier call."""
        newest_first = self._prompts[::-1]
        for knows in (SeenPrompt.is_same, SeenPrompt.is_equal):
            for seen in newest_first:
                if knows(seen, tensors):
                    return seen.number
        content = [tensor.detach().clone() for tensor in tensors]
        references = list(map(weakref.ref, tensors))
        self._prompts.append(SeenPrompt(next(self._numbers), references, edit_counts(tensors), content))
        del self._prompts[:-MOST_PROMPTS]
        return self._prompts[-1].number


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype, device and values."""
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device) and torch.equal(one, other)

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

# The reason of a refusal, for users.
TILES = "an extension calls the UNet several times a step with the same prompt (tiles?)"
# The number of prompts of one sampling that are remembered, the newest; scheduled and alternating words make several.
MOST_PROMPTS = 32


class SeenPrompt(NamedTuple):
    """A prompt that a call has had.

    number: from 0, in the order in which the prompts were first seen.
    objects: weak references to the host's tensors (Call.prompt) at that call.
    edits: how often torch had counted an in-place edit of each of them at that call (core.edits).
    content: copies of them.
    """

    number: int
    objects: list[weakref.ref[Tensor]]
    edits: list[int]
    content: list[Tensor]

    def is_same(self, tensors: list[Tensor]) -> bool:
        """Whether these are the same tensor objects, not edited since. False also if torch does not count the edits of
        one of them: then only is_equal() can tell. Does not wait for the GPU."""
        is_unedited = UNCOUNTED not in self.edits and self.edits == edit_counts(tensors)
        return is_unedited and all(known() is tensor for known, tensor in zip(self.objects, tensors, strict=True))

    def is_equal(self, tensors: list[Tensor]) -> bool:
        """Whether these tensors have the values that the prompt's tensors had at that call. Waits for the GPU."""
        return len(tensors) == len(self.content) and all(map(same_values, self.content, tensors))


class Prompts:
    """Numbers the prompts of one sampling. A prompt that is edited during the sampling gets another number. Only the
    newest MOST_PROMPTS are remembered; an older one that comes again gets a new number.

    Calls of a step with the same prompt and shape are taken for the several calls of a second-order sampler (Heun).
    They may as well be tiles of the image, computed one by one by an extension. Tiles are recognised at the first
    timestep of the sampling, at which a sampler makes one call for each prompt. At later timesteps it may make two for
    each prompt: a Heun step ends at the timestep at which the next step begins.
    """

    def __init__(self) -> None:
        self._prompts: list[SeenPrompt] = []
        self._numbers = itertools.count()
        self._first_time: float | None = None
        self._at_first: set[Hashable] = set()
        self._has_tiles = False

    def identify(self, call: Call, time: float) -> tuple[Hashable, int]:
        """(Call.signature, number of the prompt) of a call: equal for calls whose outputs follow one another from step
        to step, so that policies keep their memory by it. time: the call's timestep.

        Compares the prompt's tensors with those of earlier calls, which waits for the GPU unless they are the same
        objects. Raises Refusal if the calls may be tiles, from the second call of the first timestep with the same
        prompt and shape to the end of the sampling.
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
        """The number of the prompt with these tensors; if no remembered prompt equals it, it is remembered with a new
        number. Waits for the GPU unless the tensors are the objects of an earlier call."""
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
    """Whether two tensors have the same shape, dtype, device and values. Waits for the GPU if only values can
    differ."""
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device) and torch.equal(one, other)

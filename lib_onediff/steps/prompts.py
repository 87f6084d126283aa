"""Tell the calls of a sampling apart: by their prompts and shapes."""
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
# Words that take turns, several prompts at once: more are told apart by forgetting the oldest.
MOST_PROMPTS = 32


class SeenPrompt(NamedTuple):
    """A prompt: the tensors that the host handed over, how often they were edited then, and what was in them."""

    number: int
    objects: list[weakref.ref[Tensor]]
    edits: list[int]
    content: list[Tensor]

    def is_same(self, tensors: list[Tensor]) -> bool:
        """Whether these are the very tensors, unedited as far as that can be seen."""
        is_unedited = UNCOUNTED not in self.edits and self.edits == edit_counts(tensors)
        return is_unedited and all(known() is tensor for known, tensor in zip(self.objects, tensors, strict=True))

    def is_equal(self, tensors: list[Tensor]) -> bool:
        """Whether these hold the same values; on a GPU this waits for the queue."""
        return len(tensors) == len(self.content) and all(map(same_values, self.content, tensors))


class Threads:
    """The calls of a sampling by prompt and shape: each thread has one call a step, or more where a sampler (Heun)
    calls twice. A prompt that is edited in mid-sampling is another one.

    An extension that calls the network several times a step with the same prompt, as for tiles, shows at the sampling's
    first timestep, where the same prompt comes once otherwise. Later it may come twice: a Heun step ends at the
    timestep where the next one begins.
    """

    def __init__(self) -> None:
        self._prompts: list[SeenPrompt] = []
        self._numbers = itertools.count()
        self._first_time: float | None = None
        self._at_first: set[Hashable] = set()
        self._has_tiles = False

    def thread(self, call: Call, time: float) -> tuple[Hashable, int]:
        """The shape and the prompt of a call at a timestep. The values of its prompt's
        tensors tell, which waits for the GPU unless they are the very tensors that came before. Raises Refusal
        where one thread may have several calls a step."""
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
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device) and torch.equal(one, other)

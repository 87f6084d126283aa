"""Tell the calls of a sampling apart: by their prompts and shapes."""
from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.call import UNetCall
from ..core.refusal import Refusal
from ..weights.watch import UNCOUNTED, edit_count

TILES = "an extension calls the UNet several times a step with the same prompt (tiles?)"
# Words that take turns, several prompts at once: more are told apart by forgetting the oldest.
MOST_PROMPTS = 32


class SeenPrompt(NamedTuple):
    """A prompt: the tensors that the host handed over, and what was in them."""

    number: int
    objects: tuple[weakref.ref[Tensor] | None, ...]
    edits: tuple[int, ...]
    content: tuple[Tensor | None, ...]

    def is_same(self, tensors: tuple[Tensor | None, ...]) -> bool:
        """Whether these are the very tensors, unedited as far as that can be seen."""
        return UNCOUNTED not in self.edits and self.edits == tuple(map(edit_count, tensors)) and all(
            tensor is (None if reference is None else reference())
            for reference, tensor in zip(self.objects, tensors, strict=True)
        )

    def is_equal(self, tensors: tuple[Tensor | None, ...]) -> bool:
        """Whether these hold the same values; on a GPU this waits for the queue."""
        return all(map(same_values, self.content, tensors))


class PromptNumbers:
    """Gives every prompt of a sampling a number; a prompt that is edited in mid-sampling is another one."""

    def __init__(self) -> None:
        self._seen: list[SeenPrompt] = []
        self._next = 0

    def number(self, context: Tensor, y: Tensor | None) -> int:
        """The number of context (batch, tokens, width) and y (batch, width): what is in them tells, which waits for the
        GPU unless they are the very tensors that came before."""
        tensors = (context, y)
        for seen in reversed(self._seen):
            if seen.is_same(tensors):
                return seen.number
        for seen in reversed(self._seen):
            if seen.is_equal(tensors):
                return seen.number
        content = tuple(None if tensor is None else tensor.detach().clone() for tensor in tensors)
        objects = tuple(None if tensor is None else weakref.ref(tensor) for tensor in tensors)
        edits = tuple(map(edit_count, tensors))
        self._seen.append(SeenPrompt(self._next, objects, edits, content))
        del self._seen[:-MOST_PROMPTS]
        self._next += 1
        return self._next - 1

    def bytes(self) -> int:
        """Memory of what was in the prompts."""
        kept = [tensor for seen in list(self._seen) for tensor in seen.content if tensor is not None]
        return sum(tensor.nbytes for tensor in kept)


class Threads:
    """The calls of a sampling by prompt and shape: each thread has one call a step, or more where a sampler (Heun)
    calls twice.

    An extension that calls the network several times a step with the same prompt, as for tiles, shows at the sampling's
    first timestep, where the same prompt comes once otherwise. Later it may come twice: a Heun step ends at the
    timestep where the next one begins.
    """

    def __init__(self) -> None:
        self._prompts = PromptNumbers()
        self._first_time: float | None = None
        self._seen: set[Hashable] = set()
        self._has_tiles = False

    def thread(self, call: UNetCall, time: float, apart: Hashable = None) -> tuple[Hashable, int]:
        """The shape and the prompt of a call at a timestep. apart: what else tells shapes apart. Raises Refusal where
        one thread may have several calls a step."""
        found = (call.signature, apart), self._prompts.number(call.context, call.y)
        if self._first_time is None:
            self._first_time = time
        if time == self._first_time:
            self._has_tiles = self._has_tiles or found in self._seen
            self._seen.add(found)
        if self._has_tiles:
            raise Refusal(TILES)
        return found

    def bytes(self) -> int:
        """Memory of what was in the prompts."""
        return self._prompts.bytes()


def same_values(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device) and torch.equal(one, other)

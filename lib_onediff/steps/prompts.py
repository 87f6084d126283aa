"""The prompts and shapes by which the calls of a sampling are told apart."""
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
# Prompts of one sampling, such as words that alternate; beyond that, the oldest is forgotten.
MOST_PROMPTS = 32


class SeenPrompt(NamedTuple):
    """A prompt. objects: the host's tensors. edits: their numbers of edits in place at that time. content: their values
    then."""

    number: int
    objects: list[weakref.ref[Tensor]]
    edits: list[int]
    content: list[Tensor]

    def is_same(self, tensors: list[Tensor]) -> bool:
        """Whether these are the same tensors, without an edit that torch counts."""
        is_unedited = UNCOUNTED not in self.edits and self.edits == edit_counts(tensors)
        return is_unedited and all(known() is tensor for known, tensor in zip(self.objects, tensors, strict=True))

    def is_equal(self, tensors: list[Tensor]) -> bool:
        """Whether these tensors hold the same values. Waits for the GPU."""
        return len(tensors) == len(self.content) and all(map(same_values, self.content, tensors))


class Prompts:
    """The prompts of a sampling. Each prompt has one call a step at each shape, or more if a sampler (Heun) calls
    twice. A prompt that is edited during the sampling is another one.

    An extension that calls the network several times a step with the same prompt, such as one for tiles, is recognised
    at the sampling's first timestep, which has one call for a prompt otherwise. Later timesteps may have two: a Heun
    step ends at the timestep where the next one begins.
    """

    def __init__(self) -> None:
        self._prompts: list[SeenPrompt] = []
        self._numbers = itertools.count()
        self._first_time: float | None = None
        self._at_first: set[Hashable] = set()
        self._has_tiles = False

    def identify(self, call: Call, time: float) -> tuple[Hashable, int]:
        """The shape and the prompt's number of a call at a timestep. Prompts are compared by their tensors, which waits
        for the GPU unless these are the same objects as before. Raises Refusal if a prompt may have several calls a
        step."""
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

"""Recognise a prompt that was seen before, so that what depends on it alone is computed once."""
from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .forward import Conditioning

# Prompt, negative prompt and a few regions, called one at a time. SDXL's take 25 MiB each at 77 tokens.
MOST_ASIDE, MOST_ASIDE_BYTES = 4, 256 << 20
# Of those that no graph reads.
MOST_SIZES = 4


class Sighting:
    """Recognises the very tensors that it saw last, unedited, without keeping them alive."""

    def __init__(self) -> None:
        self._seen: tuple[tuple[weakref.ref, int], ...] | None = None

    def recognises(self, tensors: tuple[Tensor | None, ...]) -> bool:
        """True if these are the tensors of the last remember(). An inference tensor counts no edits and never is."""
        if self._seen is None or len(self._seen) != len(tensors):
            return False
        return all(
            reference() is tensor and edits >= 0 and edits == edit_count(tensor)
            for (reference, edits), tensor in zip(self._seen, tensors, strict=True)
        )

    def remember(self, tensors: tuple[Tensor | None, ...]) -> None:
        self._seen = tuple(
            (weakref.ref(tensor) if tensor is not None else returns_none, edit_count(tensor)) for tensor in tensors
        )

    def forget(self) -> None:
        self._seen = None


def returns_none() -> None:
    return None


def edit_count(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    return -1 if tensor.is_inference() else tensor._version


@dataclass(eq=False)
class HeldPrompt:
    """One prompt that was seen. edits: what the weights were. content: context and y, where the tensors themselves tell
    nothing. aside: its conditioning while another prompt's lies at the address."""

    edits: tuple
    sighting: Sighting
    content: tuple[Tensor, Tensor | None] | None = None
    aside: Conditioning | None = None

    @classmethod
    def of(cls, context: Tensor, y: Tensor | None, edits: tuple, by_content: bool) -> HeldPrompt:
        sighting = Sighting()
        sighting.remember((context, y))
        return cls(edits, sighting, (context.clone(), None if y is None else y.clone()) if by_content else None)

    def is_same(self, context: Tensor, y: Tensor | None, edits: tuple) -> bool:
        return self.edits == edits and self.sighting.recognises((context, y))

    def is_equal(self, context: Tensor, y: Tensor | None, edits: tuple) -> bool:
        """As is_same, by the values; on a GPU this waits for the queue."""
        return self.edits == edits and self.content is not None and same_content(self.content, (context, y))

    def bytes(self) -> int:
        content = [tensor for tensor in self.content or () if tensor is not None]
        return sum(tensor.nbytes for tensor in (*content, *(self.aside.tensors() if self.aside else ())))


class Place:
    """The address of the conditioning of one (batch, tokens): which prompt lies there, and those that did before. Does
    not keep the conditioning alive.

    Prompts are put aside from when the first of them has come back: until then, nothing says that they take turns.
    """

    def __init__(self, conditioning: Conditioning, occupant: HeldPrompt) -> None:
        self._conditioning = weakref.ref(conditioning)
        self.occupant = occupant
        # The least recently used first: where prompts take turns, the next one is likely the first of these.
        self._others: list[HeldPrompt] = []
        self._takes_turns = False

    @property
    def conditioning(self) -> Conditioning | None:
        """None once nobody uses this address any more."""
        return self._conditioning()

    def find(self, context: Tensor, y: Tensor | None, edits: tuple, by_content: bool) -> HeldPrompt | None:
        """The prompt, if it was seen before."""
        known = [*self._others, self.occupant]
        found = next((held for held in known if held.is_same(context, y, edits)), None)
        if found is None and by_content:
            found = next((held for held in known if held.is_equal(context, y, edits)), None)
            if found is not None:
                found.sighting.remember((context, y))
        return found

    def show(self, prompt: HeldPrompt, fresh: Conditioning) -> None:
        """Let another prompt lie here, with its conditioning."""
        kept, other = self._conditioning(), self.occupant
        if prompt in self._others:
            self._others.remove(prompt)
            self._takes_turns = True
        if other.edits == prompt.edits:
            if self._takes_turns and other.aside is None and bytes_of(kept) <= MOST_ASIDE_BYTES:
                other.aside = kept.map(Tensor.clone)
            self._others.append(other)
            while len(self._others) > MOST_ASIDE or sum(held.bytes() for held in self._others) > MOST_ASIDE_BYTES:
                del self._others[0]
        for target, source in zip(kept.tensors(), fresh.tensors(), strict=True):
            target.copy_(source)
        self.occupant = prompt

    def forget(self) -> None:
        """Trust nothing at the next call; the address stays."""
        self.occupant = HeldPrompt((), Sighting())
        self.drop_others()

    def drop_others(self) -> None:
        """Keep no prompt but the one that lies here."""
        self.occupant.aside, self._others, self._takes_turns = None, [], False

    def bytes(self) -> int:
        kept = self._conditioning()
        return 0 if kept is None else bytes_of(kept) + sum(held.bytes() for held in [self.occupant, *self._others])


class PromptMemory:
    """The conditioning of the last prompts of every (batch, tokens), at addresses that stay: CUDA graphs read it there.

    An address lives as long as anybody else holds its conditioning, as a graph does, or it is among the last few that
    were used in this sampling.
    """

    def __init__(self) -> None:
        self._places: dict[tuple, Place] = {}
        self._used: OrderedDict[tuple, Conditioning] = OrderedDict()

    def forget(self) -> None:
        """A sampling begins: trust nothing at the next call, and keep only the addresses that others hold."""
        self.drop()
        for place in list(self._places.values()):
            place.forget()

    def drop(self) -> None:
        """Give back the memory of every prompt that nobody else holds, and of those that were put aside."""
        self._used.clear()
        # A new dictionary: another thread may be counting.
        places = list(self._places.items())
        self._places = {size: place for size, place in places if place.conditioning is not None}
        for place in list(self._places.values()):
            place.drop_others()

    def bytes(self, device: torch.device | None = None) -> int:
        """Memory of all prompts, or of those on a device."""
        return sum(place.bytes() for size, place in list(self._places.items()) if device in (None, size[-1]))

    def conditioning(
        self, context: Tensor, y: Tensor | None, edits: tuple, by_content: bool,
        compute: Callable[[], Conditioning],
    ) -> Conditioning:
        """The conditioning for context and y, computed only if the prompt or the weights (edits) have changed.

        by_content: the tensors themselves tell nothing (the host hands over new ones at every call), so compare what
        is in them; on a GPU this waits for the queue. The returned tensors stay valid until the next call with the
        same batch and token count.
        """
        size = prompt_size(context, y)
        place = self._places.get(size)
        held = None if place is None else place.conditioning
        prompt = None if held is None else place.find(context, y, edits, by_content)
        if prompt is None or prompt is not place.occupant:
            fresh = compute() if prompt is None or prompt.aside is None else prompt.aside
            prompt = prompt or HeldPrompt.of(context, y, edits, by_content)
            if held is not None and fits(held, fresh):
                place.show(prompt, fresh)
            else:
                held, self._places[size] = fresh, Place(fresh, prompt)
        self._note_used(size, held)
        return held

    def _note_used(self, size: tuple, conditioning: Conditioning) -> None:
        self._used[size] = conditioning
        self._used.move_to_end(size)
        while len(self._used) > MOST_SIZES:
            self._used.popitem(last=False)


def bytes_of(conditioning: Conditioning) -> int:
    return sum(tensor.nbytes for tensor in conditioning.tensors())


def prompt_size(context: Tensor, y: Tensor | None) -> tuple:
    return context.shape, None if y is None else y.shape, context.dtype, context.device


def same_content(one: tuple[Tensor, Tensor | None], other: tuple[Tensor, Tensor | None]) -> bool:
    if not torch.equal(one[0], other[0]):
        return False
    return one[1] is other[1] if one[1] is None or other[1] is None else torch.equal(one[1], other[1])


def fits(kept: Conditioning, fresh: Conditioning) -> bool:
    pairs = list(zip(kept.tensors(), fresh.tensors(), strict=False))
    same_count = len(kept.tensors()) == len(fresh.tensors())
    return same_count and all(
        (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device) for a, b in pairs
    )

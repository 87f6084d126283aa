"""Recognise a prompt that was seen before, so that what depends on it alone is computed once."""
from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .forward import Conditioning
from .identity import Sighting

# Prompt, negative prompt and a few regions, called one at a time. SDXL's take 25 MiB each at 77 tokens.
MOST_SAVED, MOST_SAVED_BYTES = 4, 256 << 20
# Of those that no graph reads.
MOST_SIZES = 4


@dataclass(eq=False)
class HeldPrompt:
    """A prompt that a slot has computed. edits: the weights' edit counts then. saved: a copy of its conditioning, if
    there is one."""

    edits: tuple[Any, ...]
    sighting: Sighting
    saved: Conditioning | None = None

    @classmethod
    def of(cls, context: Tensor, y: Tensor | None, edits: tuple[Any, ...]) -> HeldPrompt:
        return cls(edits, Sighting((context, y)))

    def is_same(self, context: Tensor, y: Tensor | None, edits: tuple[Any, ...]) -> bool:
        return self.edits == edits and self.sighting.recognises((context, y))

    def bytes(self) -> int:
        return bytes_of(self.saved) if self.saved else 0


class Slot:
    """The tensors that hold the conditioning of one (batch, tokens), whose addresses graphs know. current: the prompt
    whose values they hold now. The slot has a weak reference to them only.

    Once an earlier prompt has come back, as where prompt and negative prompt alternate, copies of replaced values are
    kept; before that they would only take memory.
    """

    def __init__(self, conditioning: Conditioning, current: HeldPrompt) -> None:
        self._conditioning = weakref.ref(conditioning)
        self.current = current
        # The least recently used first: where prompts alternate, that is the next one.
        self._earlier: list[HeldPrompt] = []
        self._alternates = False

    @property
    def conditioning(self) -> Conditioning | None:
        """None once no graph and no recent call holds it."""
        return self._conditioning()

    def find(self, context: Tensor, y: Tensor | None, edits: tuple[Any, ...]) -> HeldPrompt | None:
        """The prompt, if this slot has computed it."""
        return next((held for held in [self.current, *self._earlier] if held.is_same(context, y, edits)), None)

    def overwrite(self, kept: Conditioning, fresh: Conditioning) -> None:
        """Let the tensors, kept, hold a conditioning whose prompt nobody will recognise."""
        kept.copy_(fresh)
        self.forget()

    def show(self, kept: Conditioning, prompt: HeldPrompt, fresh: Conditioning) -> None:
        """Overwrite the tensors, kept, with another prompt's conditioning."""
        other = self.current
        if prompt in self._earlier:
            self._earlier.remove(prompt)
            self._alternates = True
        if other.edits == prompt.edits:
            if self._alternates and other.saved is None and bytes_of(kept) <= MOST_SAVED_BYTES:
                other.saved = kept.map(Tensor.clone)
            self._earlier.append(other)
            while len(self._earlier) > MOST_SAVED or sum(held.bytes() for held in self._earlier) > MOST_SAVED_BYTES:
                del self._earlier[0]
        kept.copy_(fresh)
        self.current = prompt

    def forget(self) -> None:
        """Compute the next call's prompt anew, into the same tensors."""
        self.current = HeldPrompt((), Sighting())
        self.drop_earlier()

    def drop_earlier(self) -> None:
        """Free the copies of earlier prompts."""
        self.current.saved, self._earlier, self._alternates = None, [], False

    def bytes(self) -> int:
        kept = self._conditioning()
        return 0 if kept is None else bytes_of(kept) + sum(held.bytes() for held in [self.current, *self._earlier])


class PromptMemory:
    """The conditioning of the last prompts, in one slot for each (batch, tokens). CUDA graphs read it at its address.

    A slot lives as long as a graph holds its tensors; of the others, the MOST_SIZES used last in this sampling.

    changes: how often a slot got other values. At equal numbers, every slot holds the prompt that it held.
    """

    def __init__(self) -> None:
        self._slots: dict[tuple[Any, ...], Slot] = {}
        self._used: OrderedDict[tuple[Any, ...], Conditioning] = OrderedDict()
        self.changes = 0

    def forget(self) -> None:
        """A sampling begins: compute every prompt anew, and free the slots that no graph holds."""
        self.drop()
        self.changes += 1
        for slot in list(self._slots.values()):
            slot.forget()

    def drop(self) -> None:
        """Free the slots that no graph holds, and all copies."""
        self._used.clear()
        # Another thread may be counting, or adding: only copy() is atomic, a list of items is not.
        self._slots = {size: slot for size, slot in self._slots.copy().items() if slot.conditioning is not None}
        for slot in list(self._slots.values()):
            slot.drop_earlier()

    def bytes(self, device: torch.device | None = None) -> int:
        """Bytes of all slots and copies, or of those on a device."""
        return sum(slot.bytes() for size, slot in self._slots.copy().items() if device in (None, size[-1]))

    def conditioning(
        self, context: Tensor, y: Tensor | None, edits: tuple[Any, ...], compute: Callable[[], Conditioning],
    ) -> Conditioning:
        """The conditioning for context and y, computed only if the prompt or the weights (edits) have changed. It stays
        valid until the next call with the same batch and token count."""
        size = prompt_size(context, y)
        slot = self._slots.get(size)
        held = None if slot is None else slot.conditioning
        prompt = None if slot is None or held is None else slot.find(context, y, edits)
        if slot is None or held is None or prompt is not slot.current:
            self.changes += 1
            fresh = compute() if prompt is None or prompt.saved is None else prompt.saved
            prompt = prompt or HeldPrompt.of(context, y, edits)
            if slot is not None and held is not None and fits(held, fresh):
                slot.show(held, prompt, fresh)
            else:
                held, self._slots[size] = fresh, Slot(fresh, prompt)
        self._note_used(size, held)
        return held

    def computed_anew(
        self, context: Tensor, y: Tensor | None, compute: Callable[[], Conditioning]
    ) -> Conditioning:
        """As conditioning, where the tensors tell nothing: the host hands over new ones at every call, and comparing
        what is in them would wait for the GPU."""
        self.changes += 1
        size, fresh = prompt_size(context, y), compute()
        slot = self._slots.get(size)
        held = None if slot is None else slot.conditioning
        if slot is not None and held is not None and fits(held, fresh):
            slot.overwrite(held, fresh)
        else:
            held, self._slots[size] = fresh, Slot(fresh, HeldPrompt((), Sighting()))
        self._note_used(size, held)
        return held

    def _note_used(self, size: tuple[Any, ...], conditioning: Conditioning) -> None:
        self._used[size] = conditioning
        self._used.move_to_end(size)
        while len(self._used) > MOST_SIZES:
            self._used.popitem(last=False)


def bytes_of(conditioning: Conditioning) -> int:
    return sum(tensor.nbytes for tensor in conditioning.tensors())


def prompt_size(context: Tensor, y: Tensor | None) -> tuple[Any, ...]:
    return context.shape, None if y is None else y.shape, context.dtype, context.device


def fits(kept: Conditioning, fresh: Conditioning) -> bool:
    forms, wanted = ([(one.shape, one.dtype, one.device) for one in part.tensors()] for part in (kept, fresh))
    return forms == wanted

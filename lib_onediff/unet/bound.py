"""One UNet module in our care: its layout, its bound parameters, and what it remembers between calls."""
from __future__ import annotations

import logging
import time
import weakref

from torch import nn

from ..ops import Operators
from .call import UNetCall
from .foreign import Habits, Structure, scan
from .forward import Conditioning, condition
from .layout import UNetLayout, UnsupportedUNet
from .prompts import PromptMemory, Sighting
from .read import read_layout
from .weights import UNCOUNTED, Binding, Signature

log = logging.getLogger("onediff")

SECONDS_WITHIN_A_SAMPLING = 0.1


class BoundUNet:
    """Keeps layout and binding true to a module that its host may change at any time. Holds no reference to it.

    generation counts the changes of addresses: what was captured under another generation must not be replayed.
    """

    def __init__(self, unet: nn.Module, habits: Habits = Habits()) -> None:  # noqa: B008
        self._unet = weakref.ref(unet)
        self.habits = habits
        self._structure: Structure | None = None
        self._sampling_began = True
        self._last_call_ended = 0.0
        self._signature: Signature | None = None
        self._binding: Binding | None = None
        self._architecture: str | None = None
        self._unreadable: str | None = None
        self._refusal: str | None = None
        self._last_prompt = Sighting()
        self._prompts = PromptMemory()
        self.generation = 0

    @property
    def layout(self) -> UNetLayout:
        return self.binding.layout

    @property
    def architecture(self) -> str:
        if self._architecture is None:
            self._architecture = self.layout.architecture
        return self._architecture

    @property
    def binding(self) -> Binding:
        if self._binding is None:
            raise UnsupportedUNet("this UNet has not been bound yet")
        return self._binding

    def begin_sampling(self) -> None:
        """The host says that a new sampling starts: look at everything again at the next call."""
        self._sampling_began = True
        self._prompts.forget()

    def rest(self) -> None:
        """A call has ended."""
        self._last_call_ended = time.perf_counter()

    def layout_now(self) -> UNetLayout:
        """The layout as the module tree is now. Raises UnsupportedUNet with the reason."""
        refusal = self._look()
        if refusal is not None:
            raise UnsupportedUNet(refusal)
        return self.layout

    def refresh(self, call: UNetCall, by_content: bool) -> None:
        """Make the binding true for this call. Raises UnsupportedUNet with the reason if that is impossible.

        The module tree is looked at when a sampling begins: announced by begin_sampling, or seen by a context tensor
        that was not there at the last call, or, where every call brings a new one (by_content), by a pause. Addresses
        are compared at every call.
        """
        prompt = (call.context, call.y)
        if by_content:
            goes_on = time.perf_counter() - self._last_call_ended < SECONDS_WITHIN_A_SAMPLING
        else:
            goes_on = self._last_prompt.recognises(prompt)
        if self._sampling_began or not goes_on:
            self._refusal = self._look()
            self._sampling_began = False
            self._last_prompt.remember(prompt)
        if self._refusal is not None:
            raise UnsupportedUNet(self._refusal)
        if self.habits.settle is not None:
            self.habits.settle(self.binding.layers())
        signature = self.binding.signature()
        if signature != self._signature:
            began = time.perf_counter()
            copied = self.binding.bind()
            self._signature = self.binding.signature()
            self.generation += 1
            milliseconds = (time.perf_counter() - began) * 1e3
            log.debug("bound %s: %.0f MiB copied in %.0f ms", self.layout.model_name, copied / 2**20, milliseconds)

    def _look(self) -> str | None:
        """Look through the module tree, and read it again if it has changed. Returns why it cannot be run, or None."""
        unet = self._unet()
        if unet is None:
            return "the host has unloaded this UNet"
        structure = scan(unet, self.habits)
        if structure.foreign is not None:
            return structure.foreign
        if structure != self._structure:
            self._structure, self._binding, self._signature, self._architecture = structure, None, None, None
            self._unreadable = None
            try:
                self._binding = Binding(unet, read_layout(unet))
            except UnsupportedUNet as reason:
                self._unreadable = str(reason)
        return self._unreadable

    def conditioning(self, ops: Operators, call: UNetCall, by_content: bool) -> Conditioning:
        """What depends on the prompt alone, computed only when prompt or weights have changed."""
        edits = self.binding.edits()
        if call.context.is_inference() and UNCOUNTED not in edits.counts:
            # Such a tensor cannot be recognised, but edits of the weights can.
            by_content = True
        return self._prompts.conditioning(
            call.context, call.y, (self.generation, edits), by_content,
            lambda: condition(self.layout, self.binding.weights(), ops, call.context, call.y),
        )

    def release(self) -> None:
        """Forget everything and leave ordinary parameters behind, with the same values."""
        if self._binding is not None:
            self._binding.unbind()
        self._structure = self._signature = self._binding = self._architecture = None
        self._sampling_began = True
        self._prompts = PromptMemory()
        self.generation += 1

"""What the UNet's route and the VAE's share: settings, what is known of shapes, operators, memory, and the lock.

Whose settings hold: those of the innermost generation in progress, also for what it generates inside itself.
"""
from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..engines.graphs.cache import GraphCache
from ..engines.graphs.memory_pressure import MemoryPressure
from ..engines.graphs.stream_order import StreamOrder
from ..engines.managed_unet import ManagedUNet
from ..engines.operator_sets import OperatorSets
from ..guard import Guard
from ..ops.tuning_cache import TuningCache
from ..options.settings import Settings
from ..shapes.image_times import ImageTimes
from ..shapes.table import ShapeTable
from ..store.history import History
from ..weak_dictionary import WeakDictionary
from .call_stats import CallStats

# Where a generation carries its settings; a copy of it carries the same.
GENERATION = "onediff_generation"
# Why the host computes, in one line for the user.
SWITCHED_OFF = "OneDiff is switched off"
TRAINING = "gradients are being recorded (training?)"
OUT_OF_MEMORY = "out of GPU memory: the graphs were freed"


class Generation:
    """A generation's settings and why they switch OneDiff off. owner: the id of the host's object, its copies' not.
    began: by time.perf_counter()."""

    def __init__(self, owner: int, settings: Settings, why_off: str) -> None:
        self.owner, self.settings, self.why_off = owner, settings, why_off
        self.times, self.began = ImageTimes(), time.perf_counter()


class Generations:
    """Those in progress, the innermost last. One that has failed is over when the host has let go of it."""

    def __init__(self) -> None:
        self._running: list[weakref.ref[Generation]] = []

    def begin(self, p: Any, settings: Settings, why_off: str = "") -> Generation:
        """p: what the host makes the images from. A copy of one in progress goes on with it."""
        known: Generation | None = p.__dict__.get(GENERATION)
        if known is not None and known in self._alive():
            known.settings, known.why_off = settings, why_off
            return known
        p.__dict__[GENERATION] = generation = Generation(id(p), settings, why_off)
        self._running = [*map(weakref.ref, self._alive()), weakref.ref(generation)]
        return generation

    def end(self, p: Any) -> Generation | None:
        """The generation that is over. Nothing happens at the end of a copy: it goes on without it."""
        known: Generation | None = p.__dict__.pop(GENERATION, None)
        if known is None or known.owner != id(p):
            return None
        self._running = [weakref.ref(each) for each in self._alive() if each is not known]
        return known

    def times(self) -> list[ImageTimes]:
        """Of each in progress."""
        return [generation.times for generation in self._alive()]

    @property
    def innermost(self) -> Generation | None:
        return next(reversed(self._alive()), None)

    def _alive(self) -> list[Generation]:
        return [generation for reference in self._running if (generation := reference()) is not None]


class Services:
    """Made once. Whoever computes or captures does it inside computing()."""

    def __init__(self) -> None:
        # Stands around every hook of ours.
        self.guard = Guard()
        self.settings = Settings()
        self.table = ShapeTable()
        self.history = History()
        # What was measured to be best on this machine.
        self.tuning_cache = TuningCache()
        self.operators = OperatorSets(self.tuning_cache)
        # What a generation makes inside itself (a face's inpainting) has its settings.
        self.generations = Generations()
        self.call_stats = CallStats(self.generations.times, lambda: self.waits_for_compile)
        self._managed: WeakDictionary[nn.Module, ManagedUNet] = WeakDictionary()
        self._graphs = GraphCache(self.table, self._managed, lambda: self.history.pins(), self.operators.of)
        self._run_settings: Settings | None = None
        self._why_off = ""
        self._waiting = threading.local()
        self._lock = threading.RLock()
        self._order = StreamOrder()
        # Who needs GPU memory besides us asks here.
        self.pressure = MemoryPressure(
            self._graphs, self._lock, self.guard, lambda: self.generations.innermost is not None
        )

    def configure(self, settings: Settings) -> None:
        """Use these settings from the next UNet call on."""
        self.settings = settings

    @contextlib.contextmanager
    def settings_for_run(self, settings: Settings, why_off: str = "") -> Iterator[None]:
        """Use other settings for the calls made inside. why_off: the reason to show if they switch OneDiff off."""
        before = self._run_settings, self._why_off
        self._run_settings, self._why_off = settings, why_off
        try:
            yield
        finally:
            self._run_settings, self._why_off = before

    @property
    def run_settings(self) -> tuple[Settings, str] | None:
        """The settings of the generation in progress and why they switch OneDiff off; None where it has none."""
        if self._run_settings is not None:
            return self._run_settings, self._why_off
        generation = None if self.waits_for_compile else self.generations.innermost
        return None if generation is None else (generation.settings, generation.why_off)

    @property
    def waits_for_compile(self) -> bool:
        """Whether this thread's calls wait for kernels that are being compiled, and are not the host's meanwhile."""
        return getattr(self._waiting, "is_on", False)

    @contextlib.contextmanager
    def wait_for_compile(self) -> Iterator[None]:
        """Calls made inside wait for kernels that are being compiled; otherwise the host serves them meanwhile."""
        before, self._waiting.is_on = self.waits_for_compile, True
        try:
            yield
        finally:
            self._waiting.is_on = before

    @contextlib.contextmanager
    def computing(self, device: torch.device) -> Iterator[None]:
        """Kernels launched inside run alone, and on this device, whichever is torch's current one outside: other
        threads wait for the lock, and the GPU finishes the work of other streams first."""
        with self._lock, self._order.after_the_last(device):
            yield

    def free_graphs(self) -> None:
        """Drop every graph and hand the memory back to the driver; the next call at a shape captures again."""
        with self._lock:
            self._graphs.free()

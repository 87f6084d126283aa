"""Compiles a network's regions: in processes beside this one, whose work this one reads from Inductor's caches.

Inductor is Python and would take the interpreter from the picture that is being made: compiling in a thread, the host's
own steps took four times as long, and failed when torch.fx replaced torch.nn.Module.__call__ for all threads while it
traced. So what has to be read is read by the thread that makes the picture, a little before each step.
"""
from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..modes import our_modes
from ..ops import torch_ops
from ..ops.compiled import CompiledRegion, said_by
from ..ops.inductor_availability import why_no_inductor
from ..ops.inductor_ops import Attention, InductorOperators
from ..unet.bound import BoundUNet
from ..unet.layout import UNetLayout, UnsupportedUNet
from ..unet.weights import Weights
from .background import Background
from .inductor_cache import Work, import_compiler, is_noted, note
from .inductor_helper import compile_in_processes
from .inductor_plan import regions_of, weights_without_numbers

log = logging.getLogger("onediff")

# A process of its own costs seconds before it begins, and half a gigabyte of GPU memory.
MOST_HELPERS, CORES_FOR_A_HELPER = 4, 4
# How much time reading may take between steps, of the time that these take, and how long a pause counts as a step.
# With half of it an H200 took a minute until SDXL was compiled, and pictures were a quarter slower all the same.
SHARE, LONGEST_STEP_S = 0.25, 5.0


class CannotCompile(RuntimeError):
    """Inductor has failed on a region; the message says how, in one line for the user."""


class Compilable(NamedTuple):
    """What decides which regions a network has. single: for batches of one."""

    architecture: str
    dtype: torch.dtype
    device: torch.device
    single: bool


class Planned(NamedTuple):
    """The regions of a network. at_once: they were on the disk already, and are worth a pause."""

    work: list[Work]
    at_once: bool


class Inductor:
    """Which networks are compiled, and who compiles the others.

    helpers: how many processes compile what is in no cache yet; 0: the calls do it.
    """

    def __init__(self, attention: Attention = torch_ops.attention, helpers: int | None = None) -> None:
        self.operators = InductorOperators(attention)
        self.helpers = helpers_for(os.cpu_count() or 1) if helpers is None else helpers
        self._why_not: dict[torch.device, str | None] = {}
        self._begun: dict[Compilable, Future[Planned]] = {}
        self._failures: dict[Compilable, str] = {}
        self._ready: set[Compilable] = set()
        self._allowance = Allowance(SHARE)
        self._worker = Background("onediff-inductor")
        self._lock = threading.Lock()

    def why_not(self, device: torch.device) -> str | None:
        """Why Inductor cannot be used on a device, in one sentence; None if nothing is known to stand in the way."""
        if device not in self._why_not:
            self._why_not[device] = why_no_inductor(device)
        return self._why_not[device]

    def prepare(self, bound: BoundUNet, latent: Tensor, patient: bool) -> bool:
        """Whether everything that a call of this UNet needs is compiled; if not, it soon will be.

        patient: wait until it is. Raises CannotCompile.
        """
        network = network_of(bound, latent)
        if network in self._ready:
            return True
        if network in self._failures:
            raise CannotCompile(self._failures[network])
        planning = self._begin(network, bound.module, bound.layout)
        if not patient and not planning.done():
            self._allowance.step()
            return False
        if not self._read(network, planning.result(), patient):
            return False
        self._ready.add(network)
        # Or the first batch of another kind would wait.
        self._begin(network._replace(single=not network.single), bound.module, bound.layout)
        return True

    def prepare_early(self, unet: nn.Module, layout: UNetLayout, dtype: torch.dtype, device: torch.device) -> None:
        """Begin what the first calls of this UNet would have to do without."""
        for single in (False, True):
            self._begin(Compilable(layout.architecture, dtype, device, single), unet, layout)

    def is_ready(self, bound: BoundUNet, latent: Tensor) -> bool:
        """Whether a call of this UNet finds everything compiled."""
        try:
            return network_of(bound, latent) in self._ready
        except UnsupportedUNet:
            return False

    def status(self) -> dict[str, int]:
        """How many graphs this process has, and how many of them for a second time, which ought to be none."""
        return {"graphs": self.operators.graphs(), "recompiled": self.operators.recompiled()}

    def finish(self) -> None:
        """Wait for what was begun."""
        self._worker.submit(lambda: None).result()

    def _begin(self, network: Compilable, unet: nn.Module, layout: UNetLayout) -> Future[Planned]:
        with self._lock:
            if network not in self._begun:
                absent = weights_without_numbers(unet, layout, network.dtype)
                self._begun[network] = self._worker.submit(self._plan, network, layout, absent)
            return self._begun[network]

    def _plan(self, network: Compilable, layout: UNetLayout, absent: Weights) -> Planned:
        """Everything that another thread can do."""
        began = time.perf_counter()
        needed = regions_of(layout, absent, network.device, network.single)
        work = [(self.operators.region(region), shapes) for region, shapes in needed.items()]
        missing = [one for one in work if not one[0].is_ready and not is_noted(*one)]
        if self.helpers:
            compile_in_processes([(one.region, shapes) for one, shapes in missing], self.helpers, import_compiler)
            # Now they have told what else it imports.
            import_compiler()
        log.debug("Inductor: %d of %d regions compiled in %.1f s", len(missing), len(work), time.perf_counter() - began)
        return Planned(work, not missing)

    def _read(self, network: Compilable, planned: Planned, patient: bool) -> bool:
        """Read what was compiled; whether nothing is left."""
        at_once = patient or planned.at_once
        self._allowance.step()
        for compiled, shapes in planned.work:
            if compiled.is_ready:
                continue
            if not at_once and self._allowance.is_spent:
                return False
            try:
                self._allowance.spend(lambda one=compiled, given=shapes: compile_region(one, given))
            except CannotCompile as failure:
                self._failures[network] = str(failure)
                raise
        return True


class Allowance:
    """Lets work be done between the steps of a picture for as long as a share of the picture's time."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._last = time.perf_counter()
        self._saved_s = 0.0

    def step(self) -> None:
        """A step begins: the time since the last one counts, and none is saved up for a long halt."""
        now = time.perf_counter()
        earned = self._share * min(now - self._last, LONGEST_STEP_S)
        self._saved_s, self._last = min(self._saved_s, 0.0) + earned, now

    @property
    def is_spent(self) -> bool:
        return self._saved_s <= 0

    def spend(self, work: Callable[[], object]) -> None:
        """Do this on account: what it takes too long is not given for the next."""
        work()
        now = time.perf_counter()
        self._saved_s, self._last = self._saved_s - (now - self._last), now


def network_of(bound: BoundUNet, latent: Tensor) -> Compilable:
    return Compilable(bound.architecture, bound.binding.dtype, latent.device, latent.shape[0] == 1)


def helpers_for(cores: int) -> int:
    return max(1, min(MOST_HELPERS, cores // CORES_FOR_A_HELPER))


def compile_region(compiled: CompiledRegion, shapes: Any) -> None:
    """Compile a region, or read it. Raises CannotCompile."""
    try:
        with our_modes(compiled.region.device), on(compiled.region.device):
            compiled.compile(shapes)
    except Exception as error:
        log.debug("Inductor failed", exc_info=True)
        raise CannotCompile(f"Inductor could not compile its {compiled.region.kind}: {said_by(error)}") from error
    note(compiled, shapes)


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()

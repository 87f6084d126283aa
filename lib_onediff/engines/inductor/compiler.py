"""Compiles a network's regions: in processes beside this one, whose work this one reads from the disk.

Inductor is Python and would take the interpreter from the image that is being made: compiling in a thread, the host's
own steps took four times as long, and failed when torch.fx replaced torch.nn.Module.__call__ for all threads while it
traced. So this process imports Inductor when a model is loaded, and reads in the thread that makes the image, a
little before each step.
"""
from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...guard import first_line
from ...model.bound import BoundUNet
from ...model.layout import UNetLayout, UnsupportedUNet
from ...ops import torch_ops
from ...ops.availability import why_no_inductor
from ...ops.inductor.artifact import digest_of
from ...ops.inductor.compiled import CompiledRegion
from ...ops.inductor.operators import Attention, InductorOperators
from ...ops.inductor.regions import Region, Shapes
from ...ops.tuning_cache import TuningCache
from .background import Background
from .disk import Vouched, import_compiler, look_around, note_modules, path_of
from .helper import CannotCompile, compile_in_processes, compile_region
from .plan import regions_of, weights_without_numbers

log = logging.getLogger("onediff")

# A process costs half a gigabyte of GPU memory, and all of them slow the image down a little, two no less than four.
MOST_HELPERS, CORES_FOR_A_HELPER = 4, 4
# How much time reading may take between steps, of the time that these take, and how long a pause counts as a step.
# All regions of SDXL take a second from torch 2.8 on, and four before.
SHARE, LONGEST_STEP_S = 0.25, 5.0


class Compilable(NamedTuple):
    """What decides which regions a network has. single: for batches of one."""

    architecture: str
    dtype: torch.dtype
    device: torch.device
    single: bool


class Planned(NamedTuple):
    """The regions of a network. at_once: they were on the disk already, and are worth a pause. paths: of those that
    are there now; what other processes have left undone is in none. failure: why there is no plan, in one line for the
    user; "" where there is one."""

    regions: dict[CompiledRegion, Shapes]
    at_once: bool
    paths: dict[CompiledRegion, Path]
    failure: str = ""

    @property
    def has_gone(self) -> bool:
        """Whether something that was to be read was deleted since."""
        return any(not compiled.is_ready and not path.exists() for compiled, path in self.paths.items())


class Inductor:
    """Which networks are compiled, and who compiles the others.

    helpers: how many processes compile what is in no cache yet; 0: the calls do it. tuning_cache: where the digests are
    kept of what was compiled; without them nothing is read that an earlier process has compiled.
    """

    def __init__(
        self, attention: Attention = torch_ops.attention, helpers: int | None = None,
        tuning_cache: TuningCache | None = None,
    ) -> None:
        self.operators = InductorOperators(attention)
        self.helpers = helpers_for(os.cpu_count() or 1) if helpers is None else helpers
        self._vouched = Vouched(TuningCache() if tuning_cache is None else tuning_cache)
        self._why_not: dict[torch.device, str | None] = {}
        self._shapes: dict[Region, Shapes] = {}
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

    def prepare(self, bound: BoundUNet, latent: Tensor, waits_for_compile: bool) -> bool:
        """Whether everything that a call of this UNet needs is compiled; if not, it soon will be.

        waits_for_compile: wait until it is. Raises CannotCompile.
        """
        network = network_of(bound, latent)
        if network in self._ready:
            return True
        if network in self._failures:
            raise CannotCompile(self._failures[network])
        planning = self._begin(network, bound.module, bound.layout)
        if not waits_for_compile and not planning.done():
            self._allowance.step()
            return False
        planned = planning.result()
        if planned.failure:
            self._failures[network] = planned.failure
            raise CannotCompile(planned.failure)
        if planned.has_gone:
            # Or the calls would compile it.
            with self._lock:
                self._begun.pop(network, None)
            return self.prepare(bound, latent, waits_for_compile)
        if not self._read(network, planned, waits_for_compile):
            return False
        self._ready.add(network)
        note_modules()
        # Or the first batch of another kind would wait.
        self._begin(network._replace(single=not network.single), bound.module, bound.layout)
        return True

    def prepare_early(
        self, unet: nn.Module, layout: UNetLayout, dtype: torch.dtype, device: torch.device
    ) -> list[Future[Planned]]:
        """Begin what the first calls of this UNet would have to do without; what ends with it. Takes seconds, once in a
        process: what is Python would take them from an image."""
        import_compiler()
        kinds = [Compilable(layout.architecture, dtype, device, single) for single in (False, True)]
        return [self._begin(kind, unet, layout) for kind in kinds]

    def is_ready(self, bound: BoundUNet, latent: Tensor) -> bool:
        """Whether a call of this UNet finds everything compiled."""
        try:
            return network_of(bound, latent) in self._ready
        except UnsupportedUNet:
            return False

    def status(self) -> dict[str, int]:
        """How many graphs this process has, and how many calls they did not fit, which ought to be none."""
        return {"graphs": self.operators.graphs(), "refused": self.operators.refused()}

    def finish(self) -> None:
        """Wait for what was begun."""
        self._worker.submit(lambda: None).result()

    def _begin(self, network: Compilable, unet: nn.Module, layout: UNetLayout) -> Future[Planned]:
        with self._lock:
            if network not in self._begun:
                absent = weights_without_numbers(unet, layout, network.dtype)
                needed = regions_of(layout, absent, network.device, network.single)
                # Of what two kinds of batches have alike, the first decides what it is tuned for.
                regions = {self.operators.region(one): self._shapes.setdefault(one, at) for one, at in needed.items()}
                self._begun[network] = self._plan(regions, network.device)
            return self._begun[network]

    def _plan(self, regions: dict[CompiledRegion, Shapes], device: torch.device) -> Future[Planned]:
        if not all(compiled.is_ready for compiled in regions):
            return self._worker.submit(self._compiled, regions, device)
        planned: Future[Planned] = Future()
        planned.set_result(Planned(regions, at_once=True, paths={}))
        return planned

    def _compiled(self, regions: dict[CompiledRegion, Shapes], device: torch.device) -> Planned:
        """What _compile returns. No exception: the future would keep it, and with it every frame that it was raised
        in, a UNet's among them."""
        try:
            return self._compile(regions, device)
        except Exception as error:
            log.exception("Inductor cannot be prepared")
            return Planned({}, False, {}, f"Inductor cannot be prepared: {first_line(error)}")

    def _compile(self, regions: dict[CompiledRegion, Shapes], device: torch.device) -> Planned:
        """Have other processes do everything that they can."""
        paths = {
            compiled: path_of(compiled.region, shapes) for compiled, shapes in regions.items() if not compiled.is_ready
        }
        absent = [compiled for compiled, path in paths.items() if self._vouched.clear_away(path)]
        missing = [(compiled.region, regions[compiled]) for compiled in absent]
        # What could not be deleted is nobody's: no helper has written it.
        cleared = [path for path in (paths[compiled] for compiled in absent) if not path.exists()]
        if self.helpers:
            compile_in_processes(missing, self.helpers)
        for path in cleared:
            self._vouched.vouch(path, digest_of(path))
        import_compiler()
        look_around(device)
        log.debug("Inductor: %d of %d regions were not on the disk", len(missing), len(regions))
        return Planned(regions, not missing, {compiled: path for compiled, path in paths.items() if path.exists()})

    def _read(self, network: Compilable, planned: Planned, waits_for_compile: bool) -> bool:
        """Read what was compiled; whether nothing is left."""
        at_once = waits_for_compile or planned.at_once
        self._allowance.step()
        for compiled, shapes in planned.regions.items():
            if compiled.is_ready:
                continue
            if not at_once and self._allowance.is_spent:
                return False
            try:
                self._allowance.spend(partial(self._compile_here, compiled, shapes))
            except CannotCompile as failure:
                self._failures[network] = str(failure)
                raise
        return True

    def _compile_here(self, compiled: CompiledRegion, shapes: Shapes) -> None:
        """Read it, or compile it where it is not what was compiled on this machine. Raises CannotCompile."""
        path = path_of(compiled.region, shapes)
        self._vouched.vouch(path, compile_region(compiled, shapes, self._vouched.digest(path)))


class Allowance:
    """Lets work be done between the steps of an image for as long as a share of the image's time."""

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

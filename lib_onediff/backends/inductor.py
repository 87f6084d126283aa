"""Compiles a network's regions in the background, on this process's side or, at first, in processes beside it.

Inductor is Python and would share the interpreter with the picture that is being made meanwhile. What another process
compiles comes here by Inductor's caches on the disk, which takes much less time.
"""
from __future__ import annotations

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..modes import our_modes
from ..ops.availability import triton_version
from ..ops.compiled import CompiledRegion, said_by
from ..ops.inductor_availability import why_no_inductor
from ..ops.inductor_ops import InductorOperators, Plan, unready
from ..ops.regions import Region
from ..unet.bound import BoundUNet
from ..unet.layout import UNetLayout, UnsupportedUNet
from .background import Background

log = logging.getLogger("onediff")

Work = tuple[CompiledRegion, tuple[int, int]]
# A process of its own costs seconds before it begins, and half a gigabyte of GPU memory.
MOST_HELPERS, CORES_FOR_A_HELPER, REGIONS_FOR_A_HELPER = 4, 4, 4
HELPER_LIMIT_S = 600
NOTES = "onediff-regions"
PACKAGE_FOLDER = Path(__file__).resolve().parents[2]
LOW_PRIORITY = 10
SWITCHES = ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


class CannotCompile(RuntimeError):
    """Inductor has failed on a region; the message says how, in one line for the user."""


class Planned(NamedTuple):
    """The plans of one layout, and for which addresses of its weights they were made."""

    layout: weakref.ref[UNetLayout]
    generation: int
    plans: dict[bool, Plan]


class Inductor:
    """Which networks are compiled, and the thread that compiles the others.

    helpers: how many processes compile what is in no cache yet; 0: the thread does it.
    """

    def __init__(self, attention: object = None, helpers: int | None = None) -> None:
        self.operators = InductorOperators(attention) if attention else InductorOperators()
        self.helpers = helpers_for(os.cpu_count() or 1) if helpers is None else helpers
        self._planned: dict[int, Planned] = {}
        self._why_not: dict[torch.device, str | None] = {}
        self._begun: dict[Region, Future[None]] = {}
        self._worker = Background("onediff-inductor")
        self._lock = threading.Lock()

    def why_not(self, device: torch.device) -> str | None:
        """Why Inductor cannot be used on a device, in one sentence; None if nothing is known to stand in the way."""
        if device not in self._why_not:
            self._why_not[device] = why_no_inductor(device)
        return self._why_not[device]

    def prepare(self, bound: BoundUNet, latent: Tensor, patient: bool) -> bool:
        """Whether everything that a call of this UNet needs is compiled; if not, it soon will be, in the background.

        patient: wait until it is. Raises CannotCompile.
        """
        single = latent.shape[0] == 1
        # Without latents of one picture the next prompt would wait for them, and the other way round.
        for_this, for_others = (self._plan(bound, one) for one in (single, not single))
        begun = self._begin(for_this)
        if patient:
            for future in begun:
                future.result()
        if not self._succeeded(for_this):
            return False
        self._begin(for_others)
        return True

    def is_ready(self, bound: BoundUNet, latent: Tensor) -> bool:
        """Whether a call of this UNet finds everything compiled."""
        try:
            known = self._planned.get(id(bound.layout))
        except UnsupportedUNet:
            return False
        plan = known and known.plans.get(latent.shape[0] == 1)
        return plan is not None and not any(unready(self.operators, plan))

    def status(self) -> dict[str, int]:
        """How many graphs were compiled in this process, and how many of them for a second time, which is never."""
        return {"graphs": self.operators.graphs(), "recompiled": self.operators.recompiled()}

    def finish(self) -> None:
        """Wait for what was begun."""
        self._worker.submit(lambda: None).result()

    def _succeeded(self, plan: Plan) -> bool:
        waiting = [compiled for compiled, _ in unready(self.operators, plan)]
        for compiled in waiting:
            if compiled.failure is not None:
                raise CannotCompile(compiled.failure)
        return not waiting

    def _plan(self, bound: BoundUNet, single: bool) -> Plan:
        layout = bound.layout
        known = self._planned.get(id(layout))
        if known is None or known.layout() is not layout or known.generation != bound.generation:
            self._planned = {key: one for key, one in self._planned.items() if one.layout() is not None}
            known = self._planned[id(layout)] = Planned(weakref.ref(layout), bound.generation, {})
        if single not in known.plans:
            known.plans[single] = self.operators.plan(layout, bound.binding.weights(), single)
        return known.plans[single]

    def _begin(self, plan: Plan) -> list[Future[None]]:
        """Let the thread compile what of a plan is not begun yet; everything of it that is under way."""
        with self._lock:
            waiting = list(unready(self.operators, plan))
            new = [(one, size) for one, size in waiting if one.region not in self._begun]
            if new:
                future = self._worker.submit(self._compile, new)
                self._begun.update(dict.fromkeys([one.region for one, _ in new], future))
            return list({id(future): future for future in (self._begun[one.region] for one, _ in waiting)}.values())

    def _compile(self, work: list[Work]) -> None:
        began = time.perf_counter()
        if self.helpers:
            self._let_helpers_compile([one for one in work if not is_noted(*one)])
        compile_all(work)
        undone = [one.region for one, _ in work if not one.is_ready and one.failure is None]
        for region in undone:
            # Another network may need it, and live without what has failed.
            del self._begun[region]
        count = sum(one.is_ready for one, _ in work)
        log.debug("Inductor: %d of %d regions ready in %.1f s", count, len(work), time.perf_counter() - began)

    def _let_helpers_compile(self, work: list[Work]) -> None:
        count = min(self.helpers, -(-len(work) // REGIONS_FOR_A_HELPER))
        # Neighbours are alike: dealt out in turns, each helper has as much to do.
        shares = [[(one.region, size) for one, size in work[index::count]] for index in range(count)]
        helpers = [start_helper(share) for share in shares]
        for helper in helpers:
            wait_for_helper(helper)


def helpers_for(cores: int) -> int:
    return max(1, min(MOST_HELPERS, cores // CORES_FOR_A_HELPER))


def compile_all(work: list[Work]) -> None:
    """Compile regions one after the other; what fails keeps its reason, and stops the rest."""
    for compiled, size in work:
        if compiled.is_ready:
            continue
        try:
            with our_modes(compiled.region.device), on(compiled.region.device):
                compiled.compile(size)
            note(compiled, size)
        except Exception as error:
            log.debug("Inductor failed", exc_info=True)
            compiled.failure = f"Inductor could not compile its {compiled.region.kind}: {said_by(error)}"
            # The network needs all of them.
            return


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


# --- what is in the caches --------------------------------------------------------------------------------------------


def note_of(compiled: CompiledRegion, size: tuple[int, int]) -> Path:
    """A file beside Inductor's caches that says that a region is in them."""
    from torch._inductor.codecache import cache_dir

    version = f"{torch.__version__}-{triton_version()}".replace("+", "-")
    return Path(cache_dir(), NOTES, f"{compiled.region.digest}-{size[0]}x{size[1]}-{version}")


def is_noted(compiled: CompiledRegion, size: tuple[int, int]) -> bool:
    """Whether a region was compiled on this machine before, so that it can be read."""
    return note_of(compiled, size).exists()


def note(compiled: CompiledRegion, size: tuple[int, int]) -> None:
    path = note_of(compiled, size)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        log.debug("the caches of Inductor cannot be noted: %s", error)


# --- processes beside this one ----------------------------------------------------------------------------------------


def start_helper(share: list[tuple[Region, tuple[int, int]]]) -> subprocess.Popen[bytes] | None:
    """A process that compiles a share, or None where none can be started."""
    command = [sys.executable, "-m", "lib_onediff.backends.inductor_helper"]
    folders = [str(PACKAGE_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        helper = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)}, stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        helper.stdin.write(pickle.dumps((switches(), share)))
        helper.stdin.close()
    except OSError as error:
        log.debug("no process to compile in: %s", error)
        return None
    return helper


def switches() -> dict[str, Any]:
    """What of torch's state is part of what Inductor compiles."""
    matmul = torch.backends.cuda.matmul
    names = [name for name in SWITCHES if hasattr(matmul, name)]
    return {"threads": torch.get_num_threads(), **{name: getattr(matmul, name) for name in names}}


def switch(values: dict[str, Any]) -> None:
    """Have this process as switches() has found another."""
    torch.set_num_threads(values["threads"])
    for name in SWITCHES:
        # Newer torch takes note of being told what it has done anyway, and compiles anew.
        if name in values and getattr(torch.backends.cuda.matmul, name) != values[name]:
            setattr(torch.backends.cuda.matmul, name, values[name])


def wait_for_helper(helper: subprocess.Popen[bytes] | None) -> None:
    """What a helper leaves undone, the thread does."""
    if helper is None:
        return
    try:
        helper.wait(HELPER_LIMIT_S)
    except subprocess.TimeoutExpired:
        helper.kill()
        helper.wait()
    log.debug("a process that compiled has ended with %s", helper.returncode)

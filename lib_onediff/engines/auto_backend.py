"""Which backend "auto" means on a machine where OneDiff's own kernels cannot run: measured once, by its images."""
from __future__ import annotations

import platform
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from ..model.call import UNetCall
from ..ops.tuning_cache import TuningCache
from ..shapes.table import Entry
from . import CUDAGRAPH, EAGER, INDUCTOR, Candidates

PLAIN = (EAGER, CUDAGRAPH)
# Of each backend, at one shape.
ENOUGH_CALLS = 3
# Inductor compiles for a minute, and for minutes on a CPU, whose cores it takes: faster calls are let alone.
WORTH_LOOKING_MS = {"cuda": 20.0, "cpu": 500.0}
WORTH_HAVING = 0.95


class CallsMade(NamedTuple):
    """Calls that a backend has made at one shape."""

    entry: Entry
    calls: int


class AutoBackend:
    """Has Inductor compiled where calls take long, lets it and the plain backend each make some of them, and keeps to
    the faster one from then on.

    Not for several threads at once: whoever calls holds the runtime's lock.
    """

    def __init__(self, tuning_cache: TuningCache) -> None:
        self._tuning_cache = tuning_cache
        self._calls: dict[Hashable, dict[str, CallsMade]] = {}
        self._failure = ""

    def candidates(self, plain: Candidates, call: UNetCall) -> Candidates:
        """The backends to try for a call, where these would serve without Inductor."""
        backend = plain.backends[0]
        if backend not in PLAIN or self._failure:
            return plain
        chosen = self._chosen(call.latent.device)
        if chosen and chosen["backend"] != INDUCTOR:
            return plain
        if chosen or self._is_next(backend, call):
            return Candidates((INDUCTOR, *plain.backends), "")
        return plain

    def note(self, entry: Entry, call: UNetCall) -> None:
        """A call was served, by a graph or without one; when enough were by both, choose."""
        device, served_by = call.latent.device, entry.key.backend
        if served_by not in (*PLAIN, INDUCTOR) or self._chosen(device):
            return
        calls = self._calls.setdefault(shape_of(call), {})
        calls[served_by] = CallsMade(entry, calls[served_by].calls + 1 if served_by in calls else 1)
        plain = next((name for name in PLAIN if name in calls), None)
        if plain is None or INDUCTOR not in calls or calls[INDUCTOR].calls <= ENOUGH_CALLS:
            return
        inductor, other = calls[INDUCTOR].entry.own.timing, calls[plain].entry.own.timing
        if inductor is not None and other is not None:
            better = INDUCTOR if inductor.median < WORTH_HAVING * other.median else plain
            rounded = {INDUCTOR: round(inductor.median, 2), plain: round(other.median, 2)}
            self._tuning_cache.set(name_for(device), {"backend": better, "times": rounded})
            self._calls.clear()

    def is_choosing(self, backend: str, device: torch.device) -> bool:
        """Whether calls by this backend are still being counted and timed, to choose."""
        return backend in (*PLAIN, INDUCTOR) and not self._failure and self._chosen(device) is None

    def is_inductor(self, device: torch.device) -> bool:
        """Whether that is what was chosen."""
        chosen = self._chosen(device)
        return chosen is not None and chosen["backend"] == INDUCTOR

    def fail(self, reason: str) -> None:
        """Inductor cannot compile here: do without it in this process."""
        self._failure = reason

    def sentence(self) -> str:
        """What was chosen and why, for the user; "" where nothing had to be."""
        for device in ("cuda", "cpu"):
            chosen = self._chosen(torch.device(device)) if device == "cpu" or torch.cuda.is_available() else None
            if chosen:
                best = chosen["backend"]
                other, = (name for name in chosen["times"] if name != best)
                times = chosen["times"]
                return (
                    f"auto is {best} here: {times[best]:.0f} ms a call against {times[other]:.0f} by {other}, measured "
                    "once on this machine"
                )
        return f"auto does without Inductor: {self._failure}" if self._failure else ""

    def _is_next(self, plain: str, call: UNetCall) -> bool:
        """Whether the plain backend has made enough calls of this shape, and they are worth a compiler."""
        seen = self._calls.get(shape_of(call), {}).get(plain)
        time = seen.entry.own.median_ms if seen and seen.calls > ENOUGH_CALLS else None
        return time is not None and time >= WORTH_LOOKING_MS[call.latent.device.type]

    def _chosen(self, device: torch.device) -> dict[str, Any] | None:
        """A choice that was made before, if it makes sense: anybody may have written it."""
        value: Any = self._tuning_cache.get(name_for(device))
        times: Any = value.get("times") if isinstance(value, dict) else None
        fits = isinstance(times, dict) and len(times) == 2 and INDUCTOR in times and value.get("backend") in times
        return value if fits and all(isinstance(time, (int, float)) for time in times.values()) else None


def name_for(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} {device.type}"
    return f"auto on {name}, torch {torch.__version__}"


def shape_of(call: UNetCall) -> Hashable:
    latent = call.latent
    return tuple(latent.shape), call.context.shape[1], latent.dtype, latent.device, call.cut is None

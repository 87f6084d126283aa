"""What was done last, by which route and why: for the status line, the API and the console."""
from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from ..model.call import CACHED, FULL, UNetCall
from ..model.deepcache.cache_run import StepPlan
from ..shapes.table import Entry
from .rows import ratio_values

log = logging.getLogger("onediff")

GRAPH, PLAIN, BLOCKS, HOST = ROUTES = ("graph", "plain", "blocks", "host")
SECONDS_UNTIL_TOLD_AGAIN = 10.0


class CallResult(NamedTuple):
    """An output, and what is needed to go on from there. reason: why it did not go by a faster route. call: as it was
    computed. plan: what DeepCache said of it. rewind: lets functions of other extensions draw the same random numbers
    again."""

    output: Tensor
    entry: Entry
    route: str
    reason: str
    call: UNetCall
    plan: StepPlan | None
    rewind: Callable[[], None] | None = None


class CallStats:
    """The last UNet call, and how many went by each route."""

    def __init__(self) -> None:
        self.route: str | None = None
        self.reason = "no image has been made yet"
        self.model: str | None = None
        self.backend: str | None = None
        self.entry: Entry | None = None
        self.calls: Counter[str] = Counter()
        self.passes: Counter[str] = Counter()
        # Why the last call was no cached pass though the option is on; why its deep layers would not be forecast.
        self.why_not_cached = self.why_reused = ""
        # Calls without the negative prompt's rows; why the last one had them though the option is on.
        self.without_negative = 0
        self.why_guided = ""
        # Calls that a forecast answered; why the last one was computed though the option is on.
        self.forecasts = 0
        self.why_no_forecast = ""
        # Calls that two GPUs have computed; which, and how many rows each, or why the last one ran on one though the
        # option is on.
        self.on_two_gpus = 0
        self.split = self.why_one_gpu = ""
        self._told_split: set[str] = set()
        self._told: dict[tuple[str, str], float] = {}

    @property
    def total(self) -> int:
        """How many UNet calls were seen."""
        return sum(self.calls.values())

    def begin(self) -> None:
        """A call begins, of which nothing is known yet."""
        self.entry = self.model = None
        self.split = ""
        self.why_not_cached = self.why_reused = self.why_guided = self.why_no_forecast = ""

    def note(self, route: str, reason: str) -> None:
        """The call went by this route; reason: why not by a faster one."""
        self.calls[route] += 1
        changed = (route, reason) != (self.route, self.reason)
        self.route, self.reason = route, reason
        sentence = f"{route} route" + (f" ({reason})" if reason else "")
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s%s", sentence, f" {self.entry.key}" if self.entry else "")
        elif changed:
            # Two routes may take turns within a step, and one line each is enough.
            now = time.monotonic()
            if now - self._told.get((route, reason), float("-inf")) > SECONDS_UNTIL_TOLD_AGAIN:
                log.info("%s", sentence)
            self._told[route, reason] = now

    def note_replay(self, entry: Entry, reason: str) -> None:
        """The call was one more of its sampling: this entry's graph replayed it."""
        self.entry, self.model, self.backend = entry, entry.model, entry.key.backend
        self.why_not_cached = self.why_reused = self.why_guided = self.why_no_forecast = ""
        self.note(GRAPH, reason)

    def note_pass(self, part: str, why_not_cached: str, why_reused: str = "") -> None:
        """The call was this pass of DeepCache, "" without DeepCache. why_reused: why the deep feature is not forecast,
        where that is wanted."""
        self.why_not_cached, self.why_reused = why_not_cached, why_reused
        if part:
            self.passes[part] += 1

    def note_guidance(self, why_guided: str, without_negative: bool = False) -> None:
        """The call was computed without the negative prompt's rows, or whole for this reason."""
        self.why_guided = why_guided
        self.without_negative += without_negative

    def note_forecast(self, why_not: str, is_forecast: bool = False) -> None:
        """The call was answered by a forecast, or computed, for this reason if it is not the schedule."""
        self.why_no_forecast = why_not
        self.forecasts += is_forecast

    def note_two_gpus(self, split: str) -> None:
        """The call was computed by two GPUs, which split names with the rows of each."""
        self.on_two_gpus += 1
        self.split, self.why_one_gpu = split, ""
        self._tell_once(f"two GPUs: {split}")

    def note_one_gpu(self, reason: str) -> None:
        """The call is computed by one GPU, though the option is on."""
        self.split, self.why_one_gpu = "", reason
        self._tell_once(f"one GPU: {reason}")

    def forget_two_gpus(self) -> None:
        """The option is off, or nothing is left of it."""
        self.split = self.why_one_gpu = ""

    def _tell_once(self, sentence: str) -> None:
        if sentence not in self._told_split:
            self._told_split.add(sentence)
            log.info("%s", sentence)

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """What is noted inside is a part of a call that is noted as a whole."""
        before = self.model, self.backend, self.entry, self.why_not_cached
        passes = self.passes.copy()
        try:
            yield
        finally:
            self.model, self.backend, self.entry, self.why_not_cached = before
            self.passes = passes

    def status(self) -> dict[str, Any]:
        """As plain values. step_ms and host_ms are medians at the last call's shape. ratio, host_ms / step_ms, and
        between what their spread puts it are None until both were timed often enough."""
        entry = self.entry
        return {
            "model": self.model,
            "backend": self.backend,
            "resolution": entry.key.resolution if entry else None,
            "route": self.route,
            "reason": self.reason,
            "step_ms": entry.own.median_ms if entry else None,
            "host_ms": entry.host.median_ms if entry else None,
            **ratio_values(entry.ratio if entry else None),
            "relative_error": entry.relative_error if entry else None,
            "calls": {route: self.calls[route] for route in ROUTES},
            "deepcache": {
                **{name: self.passes[name] for name in (FULL, CACHED)}, "reason": self.why_not_cached,
                "reused": self.why_reused,
            },
            "guidance": {"without_negative": self.without_negative, "reason": self.why_guided},
            "forecast": {"calls": self.forecasts, "reason": self.why_no_forecast},
            "second_gpu": {"calls": self.on_two_gpus, "split": self.split, "reason": self.why_one_gpu},
        }

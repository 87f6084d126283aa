"""The one runtime object: the routes, and what users ask of the cache: to see, to pin, and to throw away."""
from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ..engines import AUTO
from ..engines.graphs.accounting import MemorySnapshot
from .accelerator import Accelerator
from .call_stats import GRAPH, ROUTES
from .rows import LowBitErrors, ResolutionRow, Totals, rows_of

SECONDS_A_PAGE_WAITS = 0.05
# In place of CallStats.status where that fails: who reads it finds every key.
UNKNOWN: dict[str, Any] = {
    **dict.fromkeys(("model", "backend", "resolution", "route", "step_ms", "host_ms", "ratio", "ratio_range")),
    "relative_error": None, "reason": "", "calls": dict.fromkeys(ROUTES, 0), "deepcache": {}, "guidance": {},
    "forecast": {}, "second_gpu": {},
}


class Runtime(Accelerator):
    """The runtime with what users ask of its cache. Every method may be called from any thread."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = MemorySnapshot()

    # --- to see ---------------------------------------------------------------------------------------------------

    def rows(self) -> list[ResolutionRow]:
        """What is known about every resolution, the last used first."""
        memory, entries = self._look(), self.table.entries()
        for entry in entries:
            entry.bytes = memory.gives_back({entry.key})
        return rows_of(entries, self.history.rows(), self.pins.all(), memory.gives_back, self.call_stats.times_of)

    def totals(self) -> Totals:
        """What all graphs hold and may hold, what lies on the disk, and how often a graph served a call."""
        calls = self.call_stats.status()["calls"]
        count = sum(calls.values())
        return Totals(
            vram=self._look().vram, budget=self._graphs.allowed(self.settings.memory_budget),
            disk=self.history.size_bytes(), calls=calls, hit_rate=calls[GRAPH] / count if count else None,
            low_bit=self._graphs.low_bit_bytes(),
            offloaded=self._graphs.offloaded_bytes(),
            inductor=self.operators.inductor.status(), oneflow=self._fallback.oneflow_graphs,
            low_bit_errors=list(self._low_bit_errors()),
        )

    def _low_bit_errors(self) -> Iterator[LowBitErrors]:
        """Of every checkpoint once: a second GPU's copy has the same."""
        choices = [choice for managed in self._managed.values() if (choice := managed.low_bit_choice) is not None]
        for choice in {choice.question.findings.name: choice for choice in choices}.values():
            yield LowBitErrors(choice.model, choice.question.budget, choice.error, choice.classes)

    def status(self) -> dict[str, Any]:
        """What the last call was, by which route it went and why, as plain values for a page or JSON; see CallStats."""
        settings = self._run_settings or self.settings
        # What fails says so among the faults, and costs no other part.
        part: Any = partial(self.guard.attempt, "the status")
        status = part(self.call_stats.status, UNKNOWN)
        return {
            "enabled": settings.enabled, **status, "backend": status["backend"] or settings.backend,
            "vae": part(self.vae.status, {}), "inductor": part(lambda: self.operators.inductor.status(), {}),
            "auto": part(lambda: self.operators.auto.sentence(), "") if settings.backend == AUTO else "",
            "second_gpu": {**status["second_gpu"], "bytes": part(self.two_gpus.bytes, 0)},
            "hint": part(self.operators.hint, "") if settings.enabled else "",
            "low_bit": part(lambda: [asdict(errors) for errors in self._low_bit_errors()], []),
            "faults": part(lambda: self.guard.faults, []),
        }

    # --- to keep --------------------------------------------------------------------------------------------------

    def open_cache(self, folder: Path) -> None:
        """Know what is remembered in a folder, and remember there from now on; safe to call again with the same one."""
        self.history.open(folder)
        self.history.keep_compiled()
        self.tuning_cache.attach(self.history.tuned, self.history.tune)

    def pin(self, resolution: str, model: str, pinned: bool) -> bool:
        """Let the graphs of a resolution ("512x512") stay when others make room, or no longer, also in later
        processes. Returns whether such a row, or pin, is known; what is not known is not pinned. Raises NotKept where
        later processes will not know."""
        known = any((row.resolution, row.model) == (resolution, model) for row in self.rows())
        known = known or (not pinned and (model, resolution) in self.pins.all())
        if known:
            self.pins.set(model, resolution, pinned)
            self.history.commit()
        return known

    def keep_history(self) -> None:
        """Remember on the disk what was used; call it between images."""
        with self._lock:
            entries = self.table.entries()
        self.history.keep(entries, times_of=self.call_stats.times_of)
        self.pressure.watch()

    # --- to throw away --------------------------------------------------------------------------------------------

    def purge(self, resolutions: Collection[str] | None = None, model: str | None = None) -> int:
        """Forget these resolutions ("512x512"), or all, of this model ("SD1"), or of all: graphs, verdicts, timings,
        and what is on the disk.

        Returns the bytes of GPU memory that were given back. Where a large graph goes, those that stay may be captured
        again in less memory; so it is best called while no image is being made (hosts.contract.WebUI.exclusively):
        torch lets nobody empty its cache during a capture. Raises NotKept where the disk keeps it.
        """
        wanted = None if resolutions is None else set(resolutions)
        with self._lock:
            doomed = [
                entry for entry in self.table.entries()
                if (wanted is None or entry.key.resolution in wanted) and model in (None, entry.model)
            ]
            freed = self._graphs.forget({entry.key for entry in doomed})
        self.history.forget(wanted, model, {entry.key.architecture for entry in doomed})
        return freed

    def purge_disk(self) -> int:
        """Forget what is on the disk, and what was measured to be best: it is measured again when it is needed. Graphs
        and pins stay. Returns the bytes of disk that came back. Raises NotKept."""
        before, pinned = self.history.size_bytes(), self.pins.all()
        self.history.forget()
        self.tuning_cache.clear()
        self.operators.measure_anew()
        if pinned:
            self.pins.replace(pinned)
        return max(0, before - self.history.size_bytes())

    def release_memory(self) -> int:
        """Drop every graph and empty torch's caches; what was proved stays proved. Returns the bytes given back.

        To be called while no image is being made; see hosts.contract.WebUI.exclusively.
        """
        with self._lock:
            return self._graphs.free()

    def _look(self) -> MemorySnapshot:
        """What the graphs hold: now, or, while a UNet call keeps the lock, when somebody last looked."""
        if self._lock.acquire(timeout=SECONDS_A_PAGE_WAITS):
            try:
                self._graphs.note_lost()
                self._seen = self._graphs.memory()
            finally:
                self._lock.release()
        return self._seen


# The one runtime object of the process.
runtime = Runtime()

"""How long the calls of a pre-warm job will take."""
from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping

from .job import Call
from .rows import ResolutionRow

MEASUREMENTS_KEPT = 12
# Recording a graph launches every kernel once more, beside the step that it follows.
STEPS_OF_A_CAPTURE = 2
Known = Mapping[tuple[str, int, int], tuple[float, "float | None"]]


class Estimates:
    """Learns from the calls that were made. Not for several threads at once."""

    def __init__(self) -> None:
        # Seconds for one latent pixel, by the number of the call at its shape.
        self._rates: dict[int, deque[float]] = {}

    def note(self, call: Call, seconds: float) -> None:
        """A call took so long."""
        rates = self._rates.setdefault(call.number, deque(maxlen=MEASUREMENTS_KEPT))
        rates.append(seconds / pixels(call))

    def seconds(self, calls: Iterable[Call], known: Known) -> float | None:
        """What these calls will take; None while that is not known for each of them. known: see known_times."""
        times = [self._of(call, known) for call in calls]
        return None if any(time is None for time in times) else sum(times)  # type: ignore[arg-type]

    def _of(self, call: Call, known: Known) -> float | None:
        step_ms, host_ms = known.get((call.size.resolution, *call.shape), (None, None))
        if step_ms is not None:
            if call.number == 0:
                # The host's own is not faster than ours, as a rule.
                return (step_ms + (host_ms or step_ms)) / 1e3
            return step_ms * (STEPS_OF_A_CAPTURE if call.number == 1 else 1) / 1e3
        rates = self._rates.get(call.number)
        return statistics.median(rates) * pixels(call) if rates else None


def known_times(rows: Iterable[ResolutionRow], model: str | None) -> Known:
    """Milliseconds of our step and of the host's by (resolution, latents, tokens), where this model was measured."""
    return {
        (row.resolution, shape.batch, shape.tokens): (shape.step_ms, shape.host_ms)
        for row in rows if model in (None, row.model)
        for shape in row.shapes if shape.step_ms is not None and not shape.control
    }


def pixels(call: Call) -> int:
    """How much work a call is, about."""
    return call.size.width * call.size.height * call.shape.latents

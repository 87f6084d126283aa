"""How much slower the model's own forward is while Inductor compiles beside it."""
from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..engines import INDUCTOR
from ..runtime.call_stats import HOST
from ..runtime.runtime import runtime
from .children import ChildFailed, Task, ask
from .clock import seconds
from .options import sizes_for
from .variants import Own, Unavailable, host

CALLS_ALONE, MOST_CALLS = 60, 3000
HEADINGS = (
    "model", "s when it is loaded", "alone: ms a call", "meanwhile: ms a call", "x alone", "calls meanwhile",
    "s until ready",
)


@dataclass
class Meanwhile:
    """Milliseconds of the model's own forward: while nothing is compiled, before or after, whichever is faster, and
    while it is. Means: a picture is the sum of its calls.

    loaded_s: seconds by which the model is loaded later. ready_s: from then on.
    """

    model: str
    loaded_s: float = 0.0
    alone_ms: float = 0.0
    meanwhile_ms: float = 0.0
    calls: int = 0
    ready_s: float = 0.0
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def cells(self) -> list[str]:
        if self.problem:
            return [self.model, f"failed: {self.problem}", *[""] * 5]
        return [
            self.model, f"{self.loaded_s:.1f}", f"{self.alone_ms:.1f}", f"{self.meanwhile_ms:.1f}",
            f"{self.meanwhile_ms / self.alone_ms:.2f}", str(self.calls), f"{self.ready_s:.1f}",
        ]


def meanwhile(model: str, options: argparse.Namespace) -> list[Meanwhile]:
    """One row, measured in a fresh process with empty caches."""
    with tempfile.TemporaryDirectory() as empty:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor", "TRITON_CACHE_DIR": f"{empty}/triton"}
        task = Task.of("meanwhile", model, INDUCTOR, sizes_for(model, options.sizes)[:1], options)
        try:
            return [Meanwhile(model, **ask(task, caches))]
        except ChildFailed as reason:
            return [Meanwhile(model, problem=str(reason))]


def child(task: Task, device: torch.device) -> dict[str, Any]:
    """Times of the calls that the model's own forward makes until Inductor's code is there."""
    unet = task.unet(device)
    arguments = task.inputs(unet, task.sizes[0])
    alone = host(unet)
    for _ in range(3):
        alone(arguments)

    def alone_s() -> float:
        return statistics.mean(seconds(lambda: alone(arguments), device) for _ in range(CALLS_ALONE))

    before_s = alone_s()
    own = Own(unet, INDUCTOR, waits_for_compile=False)
    loaded_s = seconds(own.attach, device)
    taken: list[float] = []
    while len(taken) < MOST_CALLS:
        taken.append(seconds(lambda: own(arguments), device))
        if runtime.call_stats.route != HOST:
            break
    else:
        raise Unavailable(f"Inductor was not ready after {MOST_CALLS} calls ({sum(taken):.0f} s)")
    # The last is ours.
    own.how_served()
    runtime.operators.inductor.finish()
    between, fastest_s = taken[:-1], min(before_s, alone_s())
    return {
        "loaded_s": loaded_s, "alone_ms": fastest_s * 1e3, "meanwhile_ms": statistics.mean(between) * 1e3,
        "calls": len(between), "ready_s": sum(between),
    }

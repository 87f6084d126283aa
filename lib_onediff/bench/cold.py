"""How long a fresh process takes to its first output and to its first call at full speed."""
from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..hosts.diffusers import unet as diffusers
from ..options.settings import Settings
from ..runtime.runtime import runtime
from .children import Task, ask
from .clock import synchronize
from .options import sizes_for
from .variants import VARIANTS, Own

# While kernels are compiled, the model's own forward makes the calls.
MOST_CALLS = 1000
HEADINGS = (
    "model", "variant", "empty caches: first output s", "at full speed s", "next process: first output s",
    "at full speed s", "calls",
)


@dataclass
class Start:
    """Seconds in a process with empty caches, and in the next one with what the first left behind.

    calls: with how many calls full speed was reached, that one included.
    """

    model: str
    variant: str
    first_s: float | None = None
    ready_s: float | None = None
    next_first_s: float | None = None
    next_ready_s: float | None = None
    calls: int | None = None
    problem: str = ""

    def cells(self) -> list[str]:
        if self.problem:
            return [self.model, self.variant, f"failed: {self.problem}", *[""] * 4]
        times = (self.first_s, self.ready_s, self.next_first_s, self.next_ready_s)
        return [self.model, self.variant, *(f"{time:.2f}" for time in times), str(self.calls)]


def start_of(model: str, variant: str, options: argparse.Namespace) -> Start:
    """A variant's first calls in two processes, the first of which finds every cache empty."""
    start = Start(model, variant)
    with tempfile.TemporaryDirectory() as empty:
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor", "TRITON_CACHE_DIR": f"{empty}/triton",
            "CUDA_CACHE_PATH": f"{empty}/cuda",
        }
        task = Task.of(
            "cold", model, variant, sizes_for(model, options.sizes)[:1], options, cache_folder=f"{empty}/onediff"
        )
        first = ask(task, caches)
        following = first if "problem" in first else ask(replace(task, loaded_before=True), caches)
    if "problem" in following:
        start.problem = following["problem"]
        return start
    start.first_s, start.ready_s, start.calls = first["first_s"], first["ready_s"], first["calls"]
    start.next_first_s, start.next_ready_s = following["first_s"], following["ready_s"]
    return start


def child(task: Task, device: torch.device) -> dict[str, Any]:
    """Seconds from the first call to its output, and to the output of the first call at full speed.

    Where the task says that the checkpoint was loaded before, ours was attached then, as in a WebUI, and has fetched
    its kernels; otherwise it is attached by the first call.
    """
    unet = task.unet(device)
    arguments = task.inputs(unet, task.sizes[0])
    variant = VARIANTS[task.variant]
    if variant.ours:
        # As a WebUI does when it starts.
        runtime.history.open(Path(task.cache_folder))
        runtime.tuning_cache.attach(runtime.history.tuned, runtime.history.tune)
        if task.loaded_before:
            diffusers.attach(unet, Settings(backend=variant.backend))
            runtime.operators.finish()
            runtime.operators.inductor.finish()
    synchronize(device)
    began = time.perf_counter()
    # To make a variant is part of its start: torch.compile loads a compiler.
    run = Own(unet, variant.backend, waits_for_compile=False) if variant.ours else variant.make(unet)
    run(arguments)
    synchronize(device)
    first_s = time.perf_counter() - began
    _, more = variant.make_ready(run, arguments, MOST_CALLS)
    if more == MOST_CALLS:
        return {"problem": f"not at full speed after {MOST_CALLS} calls"}
    synchronize(device)
    ready_s = time.perf_counter() - began
    if isinstance(run, Own):
        if problem := run.not_ours():
            return {"problem": problem}
        runtime.keep_history()
    return {"first_s": first_s, "ready_s": ready_s, "calls": 1 + more}

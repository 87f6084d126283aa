"""The first call at sizes that a process has never seen: the host's and ours."""
from __future__ import annotations

import argparse
import copy
import gc
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .children import Task, ask
from .clock import count_compilations, seconds
from .options import Size, another_size, many_sizes_for, name_of, ours_among
from .variants import BASELINE, VARIANTS, Own, Run

HEADINGS = (
    "model", "new size", "host eager s", "variant", "its first call s", "longer by s", "with the check s",
    "kernels compiled",
)


@dataclass
class NewSize:
    """Seconds of the first call at one size. checked_s: ours with the first-use check, which calls the host too.

    compilations: Triton kernels built by our calls there until the graph replayed; None: unknown. The first row is of
    the size at which the process warmed up: what is loaded and compiled there stays.
    """

    model: str
    size: str
    variant: str
    host_s: float | None = None
    own_s: float | None = None
    checked_s: float | None = None
    compilations: int | None = None
    problem: str = ""

    def cells(self) -> list[str]:
        if self.problem or self.host_s is None or self.own_s is None:
            return [self.model, self.size, "", self.variant, f"failed: {self.problem}", "", "", ""]
        checked = "" if self.checked_s is None else f"{self.checked_s:.3f}"
        compilations = "unknown" if self.compilations is None else str(self.compilations)
        return [
            self.model, self.size, f"{self.host_s:.3f}", self.variant, f"{self.own_s:.3f}",
            f"{self.own_s - self.host_s:+.3f}", checked, compilations,
        ]


def first_calls(model: str, options: argparse.Namespace) -> list[NewSize]:
    """First calls at every size in a fresh process, and once more with the first-use check in another."""
    sizes, variant = many_sizes_for(model, options.new_sizes), ours_among(options.variants)
    rows = [NewSize(model, f"{name_of(another_size(sizes))} (first of all)", variant)]
    rows += [NewSize(model, name_of(size), variant) for size in sizes]
    task = Task.of("first calls", model, variant, sizes, options)
    plain = ask(task)
    checked = plain if "problem" in plain else ask(replace(task, verify=True))
    if "problem" in checked:
        for row in rows:
            row.problem = checked["problem"]
        return rows
    for row, mine, verified in zip(rows, plain["sizes"], checked["sizes"], strict=True):
        row.host_s, row.own_s, row.compilations = mine["host_s"], mine["own_s"], mine["compilations"]
        row.checked_s = verified["own_s"]
    return rows


def child(task: Task, device: torch.device) -> dict[str, Any]:
    """Host and ours at another size and then at each of the task's, each first at every second one; verify: ours alone.

    Ours goes on at every size until its graph replays, as an image does.
    """
    unet = task.unet(device)
    variant = VARIANTS[task.variant]
    host = VARIANTS[BASELINE].make(unet)
    own = Own(copy.deepcopy(unet), variant.backend, task.verify)
    sizes = [another_size(task.sizes), *task.sizes]
    calls = [at_size(task, index, size, host, own, unet, device) for index, size in enumerate(sizes)]
    problem = own.not_ours()
    return {"problem": problem} if problem else {"sizes": calls}


def at_size(
    task: Task, index: int, size: Size, host: Run, own: Own, unet: nn.Module, device: torch.device
) -> dict[str, Any]:
    arguments = task.inputs(unet, size)
    result: dict[str, Any] = {}

    def time_host() -> None:
        gc.collect()
        result["host_s"] = seconds(lambda: host(arguments), device)

    def time_ours() -> None:
        gc.collect()
        result["own_s"] = seconds(lambda: own(arguments), device)

    turns = [time_host, time_ours]
    if index % 2:
        turns.reverse()
    if task.verify:
        # The check has the host make the same call; had it called here before, the check would look cheap.
        turns.remove(time_host)
    with count_compilations() as built:
        for turn in turns:
            turn()
        VARIANTS[task.variant].make_ready(own, arguments)
    return {**result, "compilations": built.count}

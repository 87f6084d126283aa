"""How much GPU memory it takes to have many sizes ready, over what the host takes at its peak."""
from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..runtime.runtime import runtime
from .children import ChildFailed, Task, ask
from .clock import MIB, synchronize
from .options import Size, many_sizes_for, name_of, ours_among
from .variants import BASELINE, VARIANTS, Own

HEADINGS = (
    "model", "order", "sizes ready", "host's peak MiB (torch)", "ours MiB", "over MiB", "host's peak MiB (driver)",
    "ours MiB", "over MiB",
)


@dataclass
class MemoryRow:
    """MiB with all sizes ready, in one order of making them so.

    Of torch: reserved (for the host its peak; ours as it stands, peak in own["peak"]). Of the driver: what the whole
    card has in use, less what it had when the process began. own["not_ready"] says why, by size.
    """

    model: str
    order: str
    variant: str
    wanted: int
    host: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def cells(self) -> list[str]:
        if self.problem:
            return [self.model, self.order, f"failed: {self.problem}", *[""] * 6]
        cells = [self.model, self.order, f"{self.own['ready']:.0f} of {self.wanted}"]
        for host, own in ((self.host["peak"], self.own["reserved"]), (self.host["driver"], self.own["driver"])):
            cells += [f"{host:.0f}", f"{own:.0f}", f"{own - host:+.0f}"]
        return cells


def memory(model: str, options: argparse.Namespace) -> list[MemoryRow]:
    """The largest size first, as the pre-warm queue orders them, and the smallest first; four fresh processes."""
    sizes = sorted(many_sizes_for(model, options.new_sizes), key=lambda size: size[0] * size[1])
    variant = ours_among(options.variants)
    rows = []
    for order, ordered in (("largest first", sizes[::-1]), ("smallest first", sizes)):
        row = MemoryRow(model, order, variant, len(sizes))
        try:
            row.host = ask(Task.of("memory", model, BASELINE, ordered, options))
            row.own = ask(Task.of("memory", model, variant, ordered, options))
        except ChildFailed as reason:
            row.problem = str(reason)
        rows.append(row)
    return rows


def child(task: Task, device: torch.device) -> dict[str, Any]:
    """MiB after the host has run at all sizes, or after ours was made ready at all. Needs a GPU."""
    used_before = used_by_all(device)
    unet = task.unet(device)
    variant = VARIANTS[task.variant]
    run = variant.make(unet)
    if variant.ours:
        # A host has made pictures before anything is pre-warmed.
        VARIANTS[BASELINE].make(unet)(task.inputs(unet, max(task.sizes, key=area)))
    for size in task.sizes:
        arguments = task.inputs(unet, size)
        run(arguments)
        if variant.ours:
            variant.make_ready(run, arguments)
    synchronize(device)
    if isinstance(run, Own):
        run.how_served()
    rows = {row.resolution: row for row in runtime.rows()}
    used = [rows[name] for name in map(name_of, task.sizes) if name in rows]
    return {
        "ready": sum(row.state == "ready" for row in used),
        "not_ready": {row.resolution: row.reason or row.state for row in used if row.state != "ready"},
        "allocated": torch.cuda.memory_allocated(device) / MIB,
        "reserved": torch.cuda.memory_reserved(device) / MIB,
        "peak": torch.cuda.max_memory_reserved(device) / MIB,
        "driver": (used_by_all(device) - used_before) / MIB,
    }


def area(size: Size) -> int:
    return size[0] * size[1]


def used_by_all(device: torch.device) -> int:
    """Bytes of the card that are in use, whoever uses them."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free

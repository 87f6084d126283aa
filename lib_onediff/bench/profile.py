"""Where the time of one call goes, kernel by kernel."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ..hosts.diffusers import unet as diffusers
from .measure import Plan
from .options import name_of
from .variants import VARIANTS, Unavailable

MOST_KERNELS = 30
HEADINGS = ("model", "size", "variant", "us", "share", "calls", "kernel")


@dataclass
class Kernel:
    """All launches of one kernel in one call of a variant; microseconds together, share of the whole call."""

    model: str
    size: str
    variant: str
    name: str
    microseconds: float
    launches: int
    share: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def cells(self) -> list[str]:
        name = self.name.replace("|", "/")[:90]
        return [
            self.model, self.size, self.variant, f"{self.microseconds:.1f}", f"{self.share:.1%}", str(self.launches),
            name,
        ]


def profile(unet: nn.Module, plan: Plan, variant: str) -> list[Kernel]:
    """The kernels of one call at plan's first size, the longest first, and then their sum. Needs a GPU.

    Raises Unavailable.
    """
    run = VARIANTS[variant].make(unet)
    arguments = plan.inputs(unet, plan.sizes[0])
    with torch.no_grad():
        run(arguments)
        VARIANTS[variant].make_ready(run, arguments)
        times = kernel_times(lambda: run(arguments))
    if VARIANTS[variant].ours:
        diffusers.detach(unet)
    return kernels(times, plan.model, name_of(plan.sizes[0]), variant)


def kernels(times: dict[str, tuple[float, int]], model: str, size: str, variant: str) -> list[Kernel]:
    """What kernel_times counted as rows: the longest, the rest in one, and the sum. Raises Unavailable for none."""
    whole = sum(microseconds for microseconds, _ in times.values())
    if not whole:
        raise Unavailable("the profiler saw no kernel")

    def row(name: str, microseconds: float, launches: int) -> Kernel:
        return Kernel(model, size, variant, name, microseconds, launches, microseconds / whole)

    longest = sorted(times.items(), key=lambda item: -item[1][0])
    rows = [row(name, *figures) for name, figures in longest[:MOST_KERNELS]]
    rest = [figures for _, figures in longest[MOST_KERNELS:]]
    if rest:
        rows.append(row(f"({len(rest)} more)", sum(time for time, _ in rest), sum(count for _, count in rest)))
    return [*rows, row("all", whole, sum(count for _, count in times.values()))]


def kernel_times(call: Callable[[], object]) -> dict[str, tuple[float, int]]:
    """(microseconds together, launches) by kernel name of what one call runs on the GPU."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    times = {}
    for event in recorded.key_averages():
        if event.device_type == DeviceType.CPU:
            continue  # launches, whose kernels are counted as themselves
        # Renamed in torch 2.4.
        microseconds = getattr(event, "self_device_time_total", None) or getattr(event, "self_cuda_time_total", 0.0)
        if microseconds:
            times[event.key] = (float(microseconds), int(event.count))
    return times

"""Measure variants side by side in one process."""
from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..hosts import diffusers
from ..verify import relative_error
from .models import inputs
from .variants import BASELINE, VARIANTS, Run, Unavailable

MIB = 2**20


@dataclass
class Row:
    """One variant at one size. Times in milliseconds (first calls in seconds), memory in MiB."""

    model: str
    size: str
    variant: str
    median_ms: float | None = None
    fastest_ms: float | None = None
    ratio: float | None = None
    relative_error: float | None = None
    first_call_s: float | None = None
    peak_mib: float | None = None
    held_mib: float | None = None
    problem: str = ""
    times_ms: list[float] = field(default_factory=list, repr=False)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """What to measure: sizes are (width, height) in pixels; batch counts latents (2 with guidance)."""

    model: str
    sizes: Sequence[tuple[int, int]]
    variants: Sequence[str]
    batch: int
    tokens: int
    dtype: torch.dtype
    runs: int


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(unet: nn.Module, plan: Plan) -> list[Row]:
    """Rows for every size and variant. unet comes in float32, which gives the reference, and leaves in plan.dtype."""
    device = next(unet.parameters()).device
    with torch.no_grad():
        unet.to(plan.dtype)
        references = exact_outputs(unet, plan)
        settle_weights(unet, plan)
        calls = {size: inputs(unet, *size, plan.batch, plan.tokens, plan.dtype) for size in plan.sizes}
        running: dict[str, Run] = {}
        rows: list[Row] = []
        for size in plan.sizes:
            at_size = [Row(plan.model, f"{size[0]}x{size[1]}", variant) for variant in plan.variants]
            for row in at_size:
                first_call(row, running, unet, calls[size], references[size], device)
            time_in_turn([row for row in at_size if not row.problem], running, calls[size], plan.runs, device)
            rows += at_size
    diffusers.detach(unet)
    compare_with_baseline(rows)
    return rows


def settle_weights(unet: nn.Module, plan: Plan) -> None:
    """Let our binding re-point the weights now: a graph of the host's forward holds their addresses."""
    smallest = min(plan.sizes, key=lambda size: size[0] * size[1])
    VARIANTS["onediff eager"](unet)(inputs(unet, *smallest, plan.batch, plan.tokens, plan.dtype))


def exact_outputs(unet: nn.Module, plan: Plan) -> dict[tuple[int, int], Tensor]:
    """The host's own outputs in float32 without TF32, from the weights and inputs as plan.dtype rounds them."""
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    unet.float()
    outputs = {}
    for size in plan.sizes:
        rounded = inputs(unet, *size, plan.batch, plan.tokens, plan.dtype)
        wide = {name: widen(value) for name, value in rounded.items()}
        outputs[size] = VARIANTS[BASELINE](unet)(wide).cpu()
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32
    unet.to(plan.dtype)
    return outputs


def widen(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: widen(item) for name, item in value.items()}
    return value.float()


def first_call(
    row: Row, running: dict[str, Run], unet: nn.Module, arguments: dict[str, Any], reference: Tensor,
    device: torch.device,
) -> None:
    """Fill in the row's first call at its size: seconds, memory and error. A failure becomes the row's problem."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    synchronize(device)
    start = time.perf_counter()
    try:
        if row.variant not in running:
            running[row.variant] = VARIANTS[row.variant](unet)
        run = running[row.variant]
        output = run(arguments)
        synchronize(device)
        row.first_call_s = time.perf_counter() - start
        # Our graphs are captured at the second call.
        output = run(arguments)
        synchronize(device)
    except (Unavailable, RuntimeError) as error:
        row.problem = str(error).splitlines()[0]
        return
    row.relative_error = relative_error(output.cpu(), reference)
    del output
    if device.type == "cuda":
        row.peak_mib = (torch.cuda.max_memory_allocated(device) - before) / MIB
        row.held_mib = (torch.cuda.memory_allocated(device) - before) / MIB


def time_in_turn(
    rows: list[Row], running: dict[str, Run], arguments: dict[str, Any], runs: int, device: torch.device
) -> None:
    """Time the variants in turn, a few calls each at a time, so that a drift of the machine meets all alike."""
    calls_in_turn = 5
    for _ in range(max(1, runs // calls_in_turn)):
        for row in rows:
            run = running[row.variant]
            run(arguments)
            row.times_ms += [timed(run, arguments, device) for _ in range(calls_in_turn)]
    for row in rows:
        row.median_ms, row.fastest_ms = statistics.median(row.times_ms), min(row.times_ms)


def timed(run: Run, arguments: dict[str, Any], device: torch.device) -> float:
    """Milliseconds of one call: by events on a GPU, else by the clock."""
    if device.type != "cuda":
        start = time.perf_counter()
        run(arguments)
        return (time.perf_counter() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run(arguments)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def compare_with_baseline(rows: list[Row]) -> None:
    baseline = {(row.model, row.size): row.median_ms for row in rows if row.variant == BASELINE}
    for row in rows:
        host_ms = baseline.get((row.model, row.size))
        if host_ms and row.median_ms:
            row.ratio = host_ms / row.median_ms

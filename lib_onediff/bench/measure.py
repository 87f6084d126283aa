"""Measure variants side by side in one process."""
from __future__ import annotations

import contextlib
import copy
import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..hosts.diffusers import unet as diffusers
from ..runtime.verify import relative_error
from .clock import give_back_memory, in_turn, memory_use, seconds
from .models import inputs
from .options import Size, another_size, name_of
from .report import number
from .variants import BASELINE, COMPILED, VARIANTS, Arguments, Own, Run

log = logging.getLogger("onediff.bench")

# What activations and graphs need beside the weights.
ROOM_TO_WORK = 8 * 2**30


HEADINGS = (
    "model", "size", "variant", "median ms", "x host", "x compile + graph", "rel. error", "error x host",
    "first call s", "peak MiB", "held MiB", "route",
)


@dataclass
class Row:
    """One variant at one size. Times in milliseconds (first calls in seconds), memory in MiB.

    ratio and compiled_ratio: how many times faster than the host, and than the host compiled and in a graph.
    host_errors: the error as a multiple of the host's own. routes: by which the timed calls of ours went.
    """

    model: str
    size: str
    variant: str
    median_ms: float | None = None
    ratio: float | None = None
    compiled_ratio: float | None = None
    relative_error: float | None = None
    host_errors: float | None = None
    first_call_s: float | None = None
    peak_mib: float | None = None
    held_mib: float | None = None
    routes: str = ""
    problem: str = ""
    times_ms: list[float] = field(default_factory=list, repr=False)

    def cells(self) -> list[str]:
        known = [self.model, self.size, self.variant]
        if self.problem:
            return [*known, self.problem, *[""] * (len(HEADINGS) - len(known) - 1)]
        forms = (
            (self.median_ms, ".2f"), (self.ratio, ".2f"), (self.compiled_ratio, ".2f"), (self.relative_error, ".1e"),
            (self.host_errors, ".2f"), (self.first_call_s, ".2f"), (self.peak_mib, ".0f"), (self.held_mib, ".0f"),
        )
        return [*known, *(number(value, form) for value, form in forms), self.routes]


@dataclass(frozen=True)
class Plan:
    """What to measure: sizes are (width, height) in pixels; batch counts latents (2 with guidance).

    patched: what a call brings for what is put on the UNet.
    """

    model: str
    sizes: Sequence[Size]
    variants: Sequence[str]
    batch: int
    tokens: int
    dtype: torch.dtype
    runs: int
    patched: Arguments = field(default_factory=dict)

    def inputs(self, unet: nn.Module, size: Size) -> Arguments:
        arguments = inputs(unet, *size, self.batch, self.tokens, self.dtype)
        for name, given in as_type(self.patched, self.dtype).items():
            arguments[name] = {**arguments.get(name, {}), **given}
        return arguments


def measure(unet: nn.Module, plan: Plan) -> list[Row]:
    """Rows for every size and variant. unet comes in float32, which gives the reference, and leaves in plan.dtype."""
    rows = [Row(plan.model, name_of(size), variant) for size in plan.sizes for variant in plan.variants]
    device = next(unet.parameters()).device
    with torch.no_grad():
        unet.to(plan.dtype)
        calls = {size: plan.inputs(unet, size) for size in plan.sizes}
        references = exact_outputs(unet, calls)
        for modules in modules_in_turn(unet, plan.variants):
            together = [row for row in rows if row.variant in modules]
            measure_together(modules, plan, together, calls, references, device)
            for variant, module in modules.items():
                if VARIANTS[variant].ours:
                    diffusers.detach(module)
    compare(rows)
    return rows


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """float32 means float32 inside."""
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32


def exact_outputs(unet: nn.Module, calls: Mapping[Size, Arguments]) -> dict[Size, Tensor]:
    """The host's own outputs in float32 without TF32, on the CPU, from the weights and inputs as they are rounded:
    every error is measured against them.

    The UNet comes and leaves in one dtype.
    """
    dtype = next(unet.parameters()).dtype
    with without_tf32():
        run = VARIANTS[BASELINE].make(unet.float())
        outputs = {size: run(as_type(arguments, torch.float32)).cpu() for size, arguments in calls.items()}
    unet.to(dtype)
    return outputs


def as_type(value: Any, dtype: torch.dtype) -> Any:
    """The same arguments with every tensor in a dtype."""
    if isinstance(value, dict):
        return {name: as_type(item, dtype) for name, item in value.items()}
    return [as_type(item, dtype) for item in value] if isinstance(value, list) else value.to(dtype)


def modules_in_turn(unet: nn.Module, variants: Sequence[str]) -> Iterator[dict[str, nn.Module]]:
    """The module that each variant runs on, for all variants that can be measured together.

    The host's variants share the UNet as it came. Each of ours gets a copy: binding moves the weights (native keeps
    those of convolutions in channels_last memory), and the host's forward over moved weights is no longer the host.
    Where the GPU lacks room for the copies, the host is measured first, and then each of ours on the same module.
    """
    hosts = [name for name in variants if not VARIANTS[name].ours]
    ours = [name for name in variants if VARIANTS[name].ours]
    if has_room_for(unet, len(ours)):
        yield dict.fromkeys(hosts, unet) | {name: copy.deepcopy(unet) for name in ours}
        return
    log.warning("The GPU has no room for a copy of the UNet: the host is measured first, then OneDiff.")
    yield dict.fromkeys(hosts, unet)
    for name in ours:
        yield {name: unet}


def has_room_for(unet: nn.Module, copies: int) -> bool:
    """Whether this many copies of a module fit beside it, with room to work. The CPU's memory is not asked."""
    parameters = list(unet.parameters())
    if parameters[0].device.type != "cuda":
        return True
    give_back_memory()
    free, _ = torch.cuda.mem_get_info(parameters[0].device)
    return copies * sum(parameter.nbytes for parameter in parameters) + ROOM_TO_WORK <= free


def measure_together(
    modules: dict[str, nn.Module], plan: Plan, rows: list[Row], calls: dict[Size, Arguments],
    references: dict[Size, Tensor], device: torch.device,
) -> None:
    """Fill in these rows, in turn at every size."""
    running: dict[str, Run] = {}
    settle(modules, plan, running)
    for size in plan.sizes:
        at_size = [row for row in rows if row.size == name_of(size)]
        for row in at_size:
            first_call(row, modules[row.variant], running, calls[size], references[size], device)
        time_in_turn([row for row in at_size if not row.problem], running, calls[size], plan.runs, device)


def settle(modules: dict[str, nn.Module], plan: Plan, running: dict[str, Run]) -> None:
    """Let ours bind the weights and the process load its libraries, at a size that is not measured."""
    for variant, module in modules.items():
        if VARIANTS[variant].ours or variant == BASELINE:
            # What fails here fails again, and is told, at the first size that is measured.
            with contextlib.suppress(RuntimeError):
                running[variant] = VARIANTS[variant].make(module)
                running[variant](plan.inputs(module, another_size(plan.sizes)))


def first_call(
    row: Row, module: nn.Module, running: dict[str, Run], arguments: Arguments, reference: Tensor,
    device: torch.device,
) -> None:
    """Fill in the row's first call at its size: seconds, memory and error. A failure becomes the row's problem."""
    variant = VARIANTS[row.variant]
    try:
        with memory_use(device) as used:
            if row.variant not in running:
                running[row.variant] = variant.make(module)
            run = running[row.variant]
            row.first_call_s = seconds(lambda: run(arguments), device)
            output, _ = variant.make_ready(run, arguments)
            if isinstance(run, Own):
                output = run.settle(arguments)
            row.relative_error = relative_error(output.cpu(), reference)
            del output
    except RuntimeError as error:
        row.problem = str(error).splitlines()[0]
        return
    row.peak_mib, row.held_mib = used.peak_mib, used.held_mib


def time_in_turn(
    rows: list[Row], running: dict[str, Run], arguments: Arguments, runs: int, device: torch.device
) -> None:
    """Time the variants in turn. A row whose calls the host served gets that as its problem."""
    for row in rows:
        run = running[row.variant]
        run(arguments)
        VARIANTS[row.variant].make_ready(run, arguments)
        if isinstance(run, Own):
            run.served.clear()
    calls = [lambda run=running[row.variant]: run(arguments) for row in rows]
    for row, times in zip(rows, in_turn(calls, runs, device), strict=True):
        row.times_ms, row.median_ms = times, statistics.median(times)
        run = running[row.variant]
        if isinstance(run, Own):
            row.routes, row.problem = run.routes(), run.not_ours()


def compare(rows: list[Row]) -> None:
    """Fill in the ratios to the host's time and error, and to the compiled host's time."""
    known = {(row.model, row.size, row.variant): row for row in rows if not row.problem}
    for row in known.values():
        host, compiled = (known.get((row.model, row.size, variant)) for variant in (BASELINE, COMPILED))
        if host is not None:
            row.ratio = quotient(host.median_ms, row.median_ms)
            row.host_errors = quotient(row.relative_error, host.relative_error)
        if compiled is not None:
            row.compiled_ratio = quotient(compiled.median_ms, row.median_ms)


def quotient(upper: float | None, lower: float | None) -> float | None:
    return upper / lower if upper is not None and lower else None

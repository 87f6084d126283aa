"""Measures the time of one UNet call by each backend, alternately in one process."""
from __future__ import annotations

import argparse
import copy
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..core.precision import TF32_CONVOLUTION, TF32_MATMUL, applied
from ..core.settings import format_value
from ..core.sizes import Size
from ..public import compile_unet, status, uncompile_unet
from ..runtime.runtime import runtime
from ..runtime.verify import relative_error
from . import models

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
HOST = "host"
HOST_GRAPH = "host+graph"
COMPILED = "compile"
COMPILED_GRAPH = "compile+graph"
HOSTS = (HOST, HOST_GRAPH, COMPILED, COMPILED_GRAPH)
# Enough calls to compile kernels, check the first output and capture graphs.
CALLS_UNTIL_READY = 4
# The number of calls of one variant before the next variant's turn.
CALLS_IN_TURN = 5
# A timestep in the second half of an image, in which errors of Low-bit are measured too.
LATE_TIMESTEP = 301.0
# By default, torch.compile gives up after eight shapes.
MOST_COMPILED_SHAPES = 256

Arguments = dict[str, Any]
Row = dict[str, Any]
Options = dict[str, Any]
Call = Callable[[], Tensor]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Variant:
    """A way to run a UNet: by OneDiff with some options, or by diffusers' own forward.

    name: as printed. For diffusers' own forward, one of HOSTS: called as it is, replayed from a CUDA graph, compiled by
        torch.compile, or compiled and replayed.
    options: OneDiff's options, by name; None for diffusers' own forward.
    """

    name: str
    options: dict[str, Any] | None = None

    def prepare(self, unet: nn.Module, arguments: Arguments) -> Call:
        """A function that runs the UNet with these arguments and returns its output. With options, OneDiff serves this
        UNet from now on; a backend that it cannot use is no error, and served_by() tells what ran instead. Raises
        RuntimeError if this machine cannot capture or compile diffusers' forward."""
        if self.options is not None:
            compile_unet(unet, **self.options)
            return lambda: unet(**arguments, return_dict=False)[0]

        def forward(**given: Any) -> Any:
            return unet.forward(**given, return_dict=False)

        if self.name in (COMPILED, COMPILED_GRAPH):
            torch._dynamo.config.cache_size_limit = MOST_COMPILED_SHAPES
            forward = torch.compile(forward, dynamic=False)
        if self.name in (HOST_GRAPH, COMPILED_GRAPH):
            return captured(forward, arguments)
        return lambda: forward(**arguments)[0]


def name_of_options(options: Mapping[str, Any]) -> str:
    """Options as they are written on the command line: "low_bit=int8 second_gpu=auto"; "" for none."""
    return " ".join(f"{name}={format_value(value)}" for name, value in options.items())


def captured(forward: Callable[..., Any], arguments: Arguments) -> Call:
    """Capture a forward with these arguments as a CUDA graph. Returns a function that replays it and returns the
    output; it copies the inputs in and the output out at each call, as a pipeline would have to. Tensors in a
    dictionary among the arguments are not copied: the graph reads them where they are. Raises RuntimeError without an
    NVIDIA GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("CUDA graphs need an NVIDIA GPU")
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    static = {name: value.clone() for name, value in tensors.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            forward(**{**arguments, **static})
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = forward(**{**arguments, **static})[0]

    def replay() -> Tensor:
        for name, value in tensors.items():
            static[name].copy_(value)
        graph.replay()
        return output.clone()

    return replay


def timed(call: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """(the result of a call, the seconds until its work is done on the device). Waits for earlier work first."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    result = call()
    wait()
    return result, time.perf_counter() - began


def free_memory() -> None:
    """Collect garbage, and return unused GPU memory to the driver."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def served_by() -> str:
    """A text for a row: the backend and route of OneDiff's last call; how two GPUs shared it, or why they did not,
    unless only one was asked for; and the reason if it was not served the fastest way."""
    now = status()
    cards = now["second_gpu"]["split"] or now["second_gpu"]["reason"]
    return ", ".join(part for part in (f"{now['backend']} {now['route']}", cards, now["reason"]) if part)


# --- steps ------------------------------------------------------------------------------------------------------------


def step(options: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """The rows of the command `step`, for every model, batch size, image size and variant: the time of a UNet call, and
    its error. Raises ValueError, with a sentence for users, if a model cannot be loaded."""
    dtype = DTYPES[options.dtype]
    variants = [Variant(name, None if name in HOSTS else {"backend": name}) for name in options.backend]
    variants += [Variant(name_of_options(chosen), chosen) for chosen in options.set]
    for model, batch in itertools.product(options.model, options.batch):
        unet = models.unet_named(model, device).to(dtype)
        for size in sizes_of(model, options):
            arguments = models.inputs(unet, size.width, size.height, batch, options.tokens, dtype)
            case = {"model": model, "size": size.resolution, "batch": batch}
            for row in side_by_side(unet, arguments, variants, options.runs, options.offload):
                yield {**case, **row}
        del unet
        free_memory()


def sizes_of(model: str, options: argparse.Namespace) -> list[Size]:
    """The sizes of --size. By default 1024x1024 if the model is "sdxl", 128x128 for tiny models, 512x512 for all
    others, also for a checkpoint of SDXL."""
    side = 512
    if model.startswith("tiny"):
        side = 128
    elif model == "sdxl":
        side = 1024
    return options.size or [Size(side, side)]


def side_by_side(
    unet: nn.Module, arguments: Arguments, chosen: list[Variant], runs: int, offloads: bool = False
) -> Iterator[Row]:
    """The rows of all variants, timed alternately. A variant that this machine does not support gets a row with a
    "note" and no times; such rows come first.

    "ms" is the median of "all_ms": the mean milliseconds of a call in each turn of CALLS_IN_TURN calls. runs: about how
    many calls of each variant are timed: one turn at least, and no partial one. x_host, error_x_host and x_compiled
    compare with the variants HOST and COMPILED_GRAPH, if they are among the chosen.

    offloads: use diffusers' group offloading: all weights are in main memory, and are copied ahead of each layer. Every
        variant then has a copy of the UNet. Otherwise OneDiff's variants alone have copies, because binding moves
        weights.
    """
    exact = exact_output(unet, arguments)
    device = arguments["sample"].device
    if offloads:
        from diffusers.hooks import apply_group_offloading

        unet.to("cpu")
    rows = []
    calls = []
    copies = []
    for variant in chosen:
        try:
            module = unet if variant.options is None and not offloads else copy.deepcopy(unet)
            if offloads:
                apply_group_offloading(module, device, offload_type="leaf_level", use_stream=True)
            call, measured = make_ready(variant, module, arguments, exact)
        except RuntimeError as problem:
            yield {"backend": variant.name, "note": str(problem).splitlines()[0]}
            continue
        rows.append({"backend": variant.name, **measured, "ms": 0.0, "all_ms": []})
        calls.append(call)
        copies.append(module)
    # A few calls at a time, so that a drift of the machine's speed affects all variants alike.
    for _ in range(max(1, runs // CALLS_IN_TURN)):
        for row, call in zip(rows, calls, strict=True):
            _, seconds = timed(partial(repeated, call), device)
            row["all_ms"].append(seconds / CALLS_IN_TURN * 1e3)
            row["ms"] = statistics.median(row["all_ms"])
            if row["backend"] not in HOSTS:
                row["served_by"] = served_by()
    by_name = {row["backend"]: row for row in rows}
    host = by_name.get(HOST)
    compiled = by_name.get(COMPILED_GRAPH)
    for row in rows:
        if host is not None:
            row["x_host"] = host["ms"] / row["ms"]
            row["error_x_host"] = row["relative_error"] / host["relative_error"] if host["relative_error"] else None
        if compiled is not None:
            row["x_compiled"] = compiled["ms"] / row["ms"]
        yield row
    for module in copies:
        uncompile_unet(module)
    # The next size of this UNet gets its inputs, and diffusers' own output, where the UNet is.
    unet.to(device)


def repeated(call: Call) -> None:
    """Make CALLS_IN_TURN calls, and drop their outputs."""
    for _ in range(CALLS_IN_TURN):
        call()


def exact_output(unet: nn.Module, arguments: Arguments) -> Tensor:
    """diffusers' own output in float32 without TF32, for the weights and inputs as rounded to their dtype, as a tensor
    on the CPU. The UNet is converted to float32 for it, and back."""
    dtype = next(unet.parameters()).dtype
    with applied(((TF32_MATMUL, False), (TF32_CONVOLUTION, False))):
        output: Tensor = type(unet).forward(unet.float(), **tree_map(Tensor.float, arguments), return_dict=False)[0]
    unet.to(dtype)
    return output.cpu()


def make_ready(variant: Variant, unet: nn.Module, arguments: Arguments, exact: Tensor) -> tuple[Call, Row]:
    """(a variant's function, after enough calls to compile, check and capture everything; the first part of its row).
    The part has the relative error against `exact` ("relative_error"), on a GPU the peak of its memory in MiB beyond
    what was in use before ("peak_mib"), and the seconds of the first call with all compilations, measurements and
    checks ("first_call_s"). Raises RuntimeError if this machine does not support the variant.
    """
    free_memory()
    sample = arguments["sample"]
    timestep = arguments["timestep"]
    if sample.is_cuda:
        torch.cuda.reset_peak_memory_stats(sample.device)
        before = torch.cuda.memory_allocated(sample.device)
    with runtime.warming_up():
        call, preparing_s = timed(lambda: variant.prepare(unet, arguments), sample.device)
        _, calling_s = timed(call, sample.device)
    # The last calls use the timestep of the exact output.
    for value in (float(timestep), LATE_TIMESTEP, float(timestep)):
        timestep.fill_(value)
        for _ in range(CALLS_UNTIL_READY):
            output = call()
    measured = {"first_call_s": preparing_s + calling_s, "relative_error": relative_error(output.cpu(), exact)}
    if sample.is_cuda:
        measured["peak_mib"] = (torch.cuda.max_memory_allocated(sample.device) - before) / 2**20
    return call, measured

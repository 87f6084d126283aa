"""The ways to run one UNet that are compared. Each is a function that runs a call and returns its output."""
from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..engines import EAGER, INDUCTOR, LOW_BIT_BACKENDS, NATIVE, OUR_KERNELS, has_graphs
from ..hosts.diffusers import unet as diffusers
from ..options.settings import MOST_LOW_BIT_ERROR, Settings
from ..runtime.call_stats import GRAPH, HOST, PLAIN
from ..runtime.runtime import runtime

Arguments = dict[str, Any]
Run = Callable[[Arguments], Tensor]

CALLS_UNTIL_READY = 4
# In the second half of an image.
LATER_TIMESTEPS = (301.0,)
MANY_SIZES = 256
BUDGET = Settings().low_bit_budget


def host(unet: nn.Module) -> Run:
    """The model's own forward, launched from Python."""
    return lambda arguments: type(unet).forward(unet, **arguments, return_dict=False)[0]


def compiled(unet: nn.Module) -> Run:
    """torch.compile of the model's own forward, static shapes."""
    allow_many_sizes()
    function = torch.compile(host(unet), dynamic=False)
    return lambda arguments: function(arguments)


def allow_many_sizes() -> None:
    """Keep torch from giving up on compiling after eight sizes, models and variants together."""
    config = torch._dynamo.config
    for name in ("recompile_limit", "cache_size_limit"):  # the name before torch 2.7
        if hasattr(config, name):
            setattr(config, name, MANY_SIZES)


class Own:
    """Our forward by a backend, called as a pipeline calls it.

    served counts the backends and routes by which its calls went. waits_for_compile: calls wait for kernels to be
    compiled; otherwise the model's own forward serves them meanwhile. low_bit_budget: the option; by default every
    layer that gains by eight bits is done in them.
    """

    def __init__(
        self, unet: nn.Module, backend: str, verify: bool = False, waits_for_compile: bool = True,
        low_bit_budget: float = MOST_LOW_BIT_ERROR,
    ) -> None:
        if backend in OUR_KERNELS and not torch.cuda.is_available():
            raise RuntimeError("the native backend needs an NVIDIA GPU")
        self._unet = unet
        self._backend = backend
        low_bit = next((option for option, name in LOW_BIT_BACKENDS.items() if name == backend), "off")
        self._settings = Settings(
            backend=backend if low_bit == "off" else NATIVE, low_bit=low_bit,
            low_bit_budget=low_bit_budget,
        )
        self._waits = waits_for_compile
        self._reason = ""
        self.served: Counter[tuple[str, str]] = Counter()

    def attach(self) -> None:
        diffusers.attach(self._unet, self._settings)

    def __call__(self, arguments: Arguments) -> Tensor:
        self.attach()
        with runtime.wait_for_compile() if self._waits else contextlib.nullcontext():
            output = self._unet(**arguments, return_dict=False)[0]
        call_stats = runtime.call_stats
        self._reason = call_stats.reason
        self.served[str(call_stats.backend), str(call_stats.route)] += 1
        return output

    def settle(self, arguments: Arguments) -> Tensor:
        """Wait for nothing from now on, as the later calls of an image. Within a budget, layers are measured late in an
        image too. Returns the last output."""
        self._waits = False
        for timestep in (*LATER_TIMESTEPS, None):
            changed = {} if timestep is None else {"timestep": torch.full_like(arguments["timestep"], timestep)}
            for _ in range(CALLS_UNTIL_READY):
                output = self({**arguments, **changed})
        self.served.clear()
        return output

    def routes(self) -> str:
        """By which routes its calls went."""
        return ", ".join(route for _, route in self.served)

    def not_ours(self) -> str:
        """Why the model's own forward or another backend served one of its calls; "" where none did."""
        for backend, route in self.served:
            if route == HOST and self._waits:
                return f"the model's own forward ran: {self._reason}"
            if backend != self._backend and route != HOST:
                return f"the backend {backend} ran: {self._reason}"
        return ""


class Captured:
    """A CUDA graph per input size, replayed on copied inputs."""

    def __init__(self, function: Run) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("CUDA graphs need a GPU")
        self._function = function
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._graphs: dict[torch.Size, tuple[torch.cuda.CUDAGraph, Arguments, Tensor]] = {}

    def __call__(self, arguments: Arguments) -> Tensor:
        size = arguments["sample"].shape
        if size not in self._graphs:
            self._graphs[size] = self._capture(arguments)
        graph, static, output = self._graphs[size]
        for name in ("sample", "timestep", "encoder_hidden_states"):
            static[name].copy_(arguments[name])
        graph.replay()
        return output.clone()

    def _capture(self, arguments: Arguments) -> tuple[torch.cuda.CUDAGraph, Arguments, Tensor]:
        static = {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._function(static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            output = self._function(static)
        return graph, static, output


@dataclass(frozen=True)
class Variant:
    """make: a way to run a UNet; raises RuntimeError where this machine has none. backend: which of ours, "" for the
    host's own forward."""

    make: Callable[[nn.Module], Run]
    backend: str = ""

    @property
    def ours(self) -> bool:
        return bool(self.backend)

    def make_ready(self, run: Run, arguments: Arguments, most: int = CALLS_UNTIL_READY - 1) -> tuple[Tensor, int]:
        """Call again after a first call until it can get no faster, or for the most. Returns the last output and how
        many calls.

        The second call is at full speed, but ours only when its graph has replayed.
        """
        calls = 0
        while True:
            output, calls = run(arguments), calls + 1
            call_stats = runtime.call_stats
            launched = call_stats.entry is not None and not has_graphs(self.backend, call_stats.entry.key.device)
            fast = self.backend in ("", EAGER) or call_stats.route == (PLAIN if launched else GRAPH)
            if fast or calls == most:
                return output, calls


def own(backend: str, low_bit_budget: float = MOST_LOW_BIT_ERROR) -> Variant:
    return Variant(lambda unet: Own(unet, backend, low_bit_budget=low_bit_budget), backend)


VARIANTS: dict[str, Variant] = {
    "host eager": Variant(host),
    "host eager + CUDA graph": Variant(lambda unet: Captured(host(unet))),
    "torch.compile(host)": Variant(compiled),
    "torch.compile(host) + CUDA graph": Variant(lambda unet: Captured(compiled(unet))),
    "onediff native": own(NATIVE),
    **{f"onediff {backend}": own(backend) for backend in LOW_BIT_BACKENDS.values()},
    **{f"onediff {backend}, within the budget": own(backend, BUDGET) for backend in LOW_BIT_BACKENDS.values()},
    "onediff inductor": own(INDUCTOR),
    "onediff cudagraph": own("cudagraph"),
    "onediff eager": own("eager"),
}
BASELINE = "host eager"
COMPILED = "torch.compile(host) + CUDA graph"
WITHOUT_GPU = (BASELINE, "onediff inductor", "onediff eager")

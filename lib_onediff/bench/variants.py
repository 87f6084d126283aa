"""The ways to run one UNet that are compared. Each is a function that runs a call and returns its output."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..hosts import diffusers
from ..settings import Settings

Run = Callable[[dict[str, Any]], Tensor]


class Unavailable(Exception):
    """This variant does not exist on this machine; the message says why."""


def host(unet: nn.Module) -> Run:
    """The model's own forward, launched from Python."""
    return lambda arguments: type(unet).forward(unet, **arguments, return_dict=False)[0]


def host_graph(unet: nn.Module) -> Run:
    """The model's own forward, captured in a CUDA graph for every size."""
    return Captured(host(unet))


def compiled(unet: nn.Module) -> Run:
    """torch.compile of the model's own forward, static shapes."""
    function = torch.compile(host(unet), dynamic=False)
    return lambda arguments: function(arguments)


def compiled_graph(unet: nn.Module) -> Run:
    """The same in a CUDA graph."""
    return Captured(compiled(unet))


def own(backend: str) -> Callable[[nn.Module], Run]:
    """Our forward by a backend, called as a pipeline calls it."""

    def make(unet: nn.Module) -> Run:
        settings = Settings(backend=backend, verify=False)

        def run(arguments: dict[str, Any]) -> Tensor:
            diffusers.attach(unet, settings)
            return unet(**arguments, return_dict=False)[0]

        return run

    return make


class Captured:
    """A CUDA graph per input size, replayed on copied inputs."""

    def __init__(self, function: Run) -> None:
        if not torch.cuda.is_available():
            raise Unavailable("CUDA graphs need a GPU")
        self._function = function
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._graphs: dict[torch.Size, tuple[torch.cuda.CUDAGraph, dict[str, Any], Tensor]] = {}

    def __call__(self, arguments: dict[str, Any]) -> Tensor:
        size = arguments["sample"].shape
        if size not in self._graphs:
            self._graphs[size] = self._capture(arguments)
        graph, static, output = self._graphs[size]
        for name in ("sample", "timestep", "encoder_hidden_states"):
            static[name].copy_(arguments[name])
        graph.replay()
        return output.clone()

    def _capture(self, arguments: dict[str, Any]) -> tuple[torch.cuda.CUDAGraph, dict[str, Any], Tensor]:
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


VARIANTS: dict[str, Callable[[nn.Module], Run]] = {
    "host eager": host,
    "host eager + CUDA graph": host_graph,
    "torch.compile(host)": compiled,
    "torch.compile(host) + CUDA graph": compiled_graph,
    "onediff eager": own("eager"),
    "onediff cudagraph": own("cudagraph"),
}
BASELINE = "host eager"
WITHOUT_GPU = (BASELINE, "onediff eager")

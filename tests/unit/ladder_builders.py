"""Helpers for tests of the ladder of backends (from the fastest to the next slower one that works) without a GPU. The
native backend computes with torch's operators in place of our kernels, and can be made to fail."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from builders import SMALL_XL, a_call, diffusers_output, diffusers_unet, relative_error, served
from torch import Tensor, nn

import lib_onediff
from lib_onediff.core.layer_weights import LayerWeights
from lib_onediff.core.operators import GatedUnit
from lib_onediff.core.table import Entry
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.hosts.diffusers import unet as diffusers_host
from lib_onediff.runtime.runtime import runtime

NATIVE = "native"
CUDAGRAPH = "cudagraph"
EAGER = "eager"
ONEFLOW = "oneflow"


class StandInOperators:
    """torch's operators in place of our kernels. gated_by: computes the gated unit, which every transformer block has.
    calls: the number of gated units computed."""

    def __init__(self) -> None:
        self.gated_by: Callable[[Tensor, GatedUnit, LayerWeights], Tensor] = torch_ops.gated
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch_ops, name)

    def gated(self, tokens: Tensor, unit: GatedUnit, reader: LayerWeights) -> Tensor:
        self.calls += 1
        return self.gated_by(tokens, unit, reader)

    def gated_linear(self, x: Tensor, layer: LayerWeights, unit: GatedUnit, reader: LayerWeights) -> Tensor:
        return self.gated(torch_ops.linear(x, layer), unit, reader)

    def fail_with(self, error: BaseException) -> None:
        """Let the gated unit raise this error at each call, until recover()."""

        def broken(tokens: Tensor, unit: GatedUnit, reader: LayerWeights) -> Tensor:
            raise error

        self.gated_by = broken

    def recover(self) -> None:
        self.gated_by = torch_ops.gated


def pretend_a_gpu(monkeypatch: pytest.MonkeyPatch, operators: Any) -> None:
    """Let the backends native and cudagraph serve on this machine. native uses these operators, which need no GPU."""
    native = runtime.devices.named(NATIVE)
    graphs = runtime.devices.named(CUDAGRAPH)
    monkeypatch.setattr(native, "_operators", operators)  # type: ignore[attr-defined]
    for device in (native, graphs):
        monkeypatch.setattr(device, "refuse", lambda *given: None)
    monkeypatch.setattr(native, "why_not", lambda device: None)
    monkeypatch.setattr(native, "prepare", lambda *given, **more: None)


def small_xl() -> nn.Module:
    """A small SDXL-like UNet that OneDiff serves."""
    return lib_onediff.compile_unet(diffusers_unet(**SMALL_XL))


def attached(**config: Any) -> nn.Module:
    """A UNet that OneDiff serves with the runtime's settings. config: overrides, as in builders.LAYOUTS."""
    unet = diffusers_unet(**config)
    diffusers_host.attach(unet)
    return unet


def entry_of(backend: str) -> Entry:
    """The only entry of this backend in the runtime's table."""
    [entry] = [entry for entry in runtime.table.entries() if entry.key.backend == backend]
    return entry


def served_by() -> tuple[str, str]:
    """(backend, route) of the last call. route: "graph" for a replay of a CUDA graph, "plain" for our forward without a
    graph, "host" for the host's own forward."""
    status = lib_onediff.status()
    return status["backend"], status["route"]


def reason() -> str:
    """Why the last call was not served by a faster route; "" if there is none."""
    return lib_onediff.status()["reason"]


def error(unet: nn.Module, call: UNetCall) -> float:
    """The relative error of the output of a served call against diffusers' own forward."""
    return relative_error(served(unet, call), diffusers_output(unet, call))


def make_ready(unet: nn.Module, *sizes: tuple[int, int]) -> None:
    """Make three calls at each of these sizes, (height, width) in latent pixels. The third is a replay of native's
    graph."""
    for height, width in sizes:
        for route in ("plain", "plain", "graph"):
            assert error(unet, a_call(unet, height, width)) < 1e-5
            assert served_by() == (NATIVE, route), reason()


def states() -> dict[str, str]:
    """The state of each resolution: "proved" if its output was checked against the host's, "ready" if it also has a
    graph."""
    return {row.resolution: row.state for row in runtime.rows()}

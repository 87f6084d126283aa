"""OneFlow compiles or runs one graph at a time, because it crashes the process if it compiles one graph while it runs
another."""
from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from builders import SMALL, a_call, diffusers_unet, served
from ladder_builders import ONEFLOW
from torch import Tensor

import lib_onediff
from lib_onediff.core.key import ShapeKey
from lib_onediff.core.refusal import Refusal
from lib_onediff.devices.oneflow import route as oneflow
from lib_onediff.families.registry import FAMILIES
from lib_onediff.runtime.runtime import runtime

SECONDS = 60


class Watched:
    """Replaces OneFlow's runs: notes whether two of them overlap. A run ends only once may_end is set."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.may_end.set()
        self.inside = 0
        self.overlapped = False
        self.runs = 0

    def run(self, graph: Any, given: list[Tensor]) -> list[Tensor]:
        self.inside += 1
        self.overlapped |= self.inside > 1
        assert self.may_end.wait(SECONDS)
        self.inside -= 1
        self.runs += 1
        return [given[0].clone()]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    watched = Watched()
    operators = SimpleNamespace(graph_of=lambda forward, weights: object(), run_graph=watched.run)
    monkeypatch.setitem(sys.modules, "lib_onediff.devices.oneflow.operators", operators)
    yield watched
    watched.may_end.set()


def test_no_graph_runs_while_another_one_is_compiled(watched: Watched) -> None:
    """A graph is compiled at its first run. `watched` holds the compilation for the second call. Meanwhile, calls of
    both graphs are refused with a reason, and a warm-up waits."""
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL), backend="eager")
    calls = [a_call(unet), a_call(unet, 16, 8)]
    for call in calls:
        served(unet, call)
    network = runtime.services.networks.get(unet)
    route = oneflow.OneFlow(FAMILIES.output)

    def runner(index: int, is_warm_up: bool = False) -> oneflow.OneFlowRunner:
        call = calls[index]
        bound = network.bound
        key = ShapeKey.of(bound.layout.architecture, bound.binding.dtype, call, ONEFLOW)
        return route.runner(network, key, call, is_warm_up)

    runner(0, is_warm_up=True).run(calls[0])
    watched.may_end.clear()
    for index, reason in ((1, oneflow.COMPILING), (0, oneflow.COMPILING_ANOTHER)):
        with pytest.raises(Refusal, match=re.escape(reason)):
            runner(index)
    waiting = threading.Thread(target=lambda: runner(0, is_warm_up=True).run(calls[0]))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive() and not watched.overlapped
    watched.may_end.set()
    waiting.join(SECONDS)
    runner(1, is_warm_up=True).run(calls[1])
    runner(0).run(calls[0])
    assert not watched.overlapped and watched.runs == 6

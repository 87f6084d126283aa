"""Every test of this folder starts with one thread, a fixed seed and a runtime that has seen nothing."""
from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import half_on_cpu
import pytest
import torch
from graph_builders import PretendedGraphs
from ladder_builders import Weather, steps_of_a_gpu

from lib_onediff import auto_choice, backends
from lib_onediff.accelerator import runtime
from lib_onediff.settings import Settings
from lib_onediff.shapes.history import History

# The networks are so small that threads cost more than they give, above all when several test runs share a machine.
torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[Any]:
    """Skip what needs float16 where torch has none on a CPU, whichever of a test's types that is."""
    try:
        return (yield)
    except RuntimeError as error:
        if half_on_cpu.CAN_COMPUTE or half_on_cpu.NOT_IMPLEMENTED not in str(error):
            raise
        pytest.skip(half_on_cpu.REASON)


@pytest.fixture(autouse=True)
def fresh_runtime() -> Iterator[None]:
    torch.manual_seed(0)
    runtime.choices.clear()
    runtime.purge()
    runtime.configure(Settings())
    log = logging.getLogger("onediff")
    before = log.handlers, log.level, log.propagate
    yield
    runtime.history, runtime.webui = History(), None
    runtime.choices.attach(runtime.history.tuned, runtime.history.tune)
    runtime.purge()
    runtime.configure(Settings())
    log.handlers, log.level, log.propagate = before


@pytest.fixture(autouse=True)
def no_machine_is_too_slow() -> Iterator[None]:
    """Or "auto" would have Inductor compile for minutes, in whichever test a busy machine makes its calls slow."""
    # Not the tests' own monkeypatch: asked for here, it would undo theirs after all of their fixtures.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(auto_choice.WORTH_LOOKING_MS, "cpu", math.inf)
        yield


@pytest.fixture
def seen() -> Iterator[Any]:
    """A page with the OneDiff tab open, before a very small WebUI."""
    pytest.importorskip("gradio")
    from panel_builders import Seen

    page = Seen.open()
    yield page
    page.close()


@pytest.fixture
def weather(monkeypatch: pytest.MonkeyPatch) -> Weather:
    """The operators of the native backend, on a machine that seems to have a GPU and Triton."""
    operators = Weather()
    monkeypatch.setattr(backends, "steps", steps_of_a_gpu)
    monkeypatch.setitem(runtime.operators._made, backends.NATIVE, operators)
    monkeypatch.setattr(runtime.operators, "prepare", lambda network, patient: True)
    return operators


@pytest.fixture
def pretended(weather: Weather, monkeypatch: pytest.MonkeyPatch) -> PretendedGraphs:
    """Graphs, and the memory of a GPU, for the backends of weather."""
    graphs = PretendedGraphs()
    monkeypatch.setattr(runtime._graphs, "_graphs", graphs)
    monkeypatch.setattr(runtime._graphs, "card", graphs.card)
    return graphs

"""Every test of this folder starts with one thread, a fixed seed and a runtime that has seen nothing."""
from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from ladder_builders import Weather, steps_of_a_gpu

from lib_onediff import backends
from lib_onediff.accelerator import runtime
from lib_onediff.settings import Settings
from lib_onediff.shapes.history import History

# The networks are so small that threads cost more than they give, above all when several test runs share a machine.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_runtime() -> Iterator[None]:
    torch.manual_seed(0)
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


@pytest.fixture
def weather(monkeypatch: pytest.MonkeyPatch) -> Weather:
    """The operators of the native backend, on a machine that seems to have a GPU and Triton."""
    operators = Weather()
    monkeypatch.setattr(backends, "steps", steps_of_a_gpu)
    monkeypatch.setattr(runtime.operators, "_native", operators)
    monkeypatch.setattr(runtime.operators, "prepare", lambda network, patient: True)
    return operators

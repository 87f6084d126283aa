"""Fixtures that give every test a new runtime, for a folder's conftest.py to import."""
from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import pytest
import torch

from lib_onediff.core.settings import Settings
from lib_onediff.runtime import verify
from lib_onediff.runtime.runtime import runtime
from lib_onediff.steps.registry import step_policies
from lib_onediff.store.history import History

__all__ = ["fresh_runtime", "host_timed_often", "no_machine_is_too_slow"]
# The networks are so small that threads cost more than they gain, above all when several test runs share a machine.
torch.set_num_threads(1)


def seed() -> None:
    """torch.manual_seed(0). Without a GPU, only the CPU's generator is seeded: torch would also store a deferred seed
    call, with its stack, for every kind of GPU."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


def remember_nothing() -> None:
    """Detach the runtime from its cache folder, as in a new process: no history, and no stored tuning results."""
    runtime.services.history = History()
    runtime.tuning_cache.attach(runtime.history.tuned, runtime.history.tune)


@pytest.fixture(autouse=True)
def fresh_runtime() -> Iterator[None]:
    seed()
    runtime.tuning_cache.clear()
    runtime.purge()
    runtime.configure(Settings())
    # Announcements of an earlier test do not affect this one.
    runtime.end_sampling()
    runtime.stepping.policies = step_policies()
    log = logging.getLogger("onediff")
    before = log.handlers, log.level, log.propagate
    # OneDiff's script, which another test may have loaded, can switch this off.
    log.propagate = True
    yield
    remember_nothing()
    runtime.webui = None
    runtime.purge()
    runtime.configure(Settings())
    runtime.guard.forget()
    log.handlers, log.level, log.propagate = before


@pytest.fixture(autouse=True)
def no_machine_is_too_slow() -> Iterator[None]:
    """The host's forward is timed only once for each shape. Tests of speedups use host_timed_often instead."""
    # Not by the tests' own monkeypatch, which would then be undone after all of their fixtures.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "SECONDS_TO_TIME_THE_HOST", -1.0)
        yield


@pytest.fixture
def host_timed_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's forward is timed ENOUGH times to show a speedup, however slow it is on a busy machine."""
    monkeypatch.setattr(verify, "SECONDS_TO_TIME_THE_HOST", math.inf)

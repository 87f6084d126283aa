"""Every test of this folder starts with one thread, a fixed seed and a runtime that has seen nothing."""
from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

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
    runtime.purge()
    runtime.configure(Settings())
    log.handlers, log.level, log.propagate = before

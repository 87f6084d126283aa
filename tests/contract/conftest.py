"""Contract tests: every host's adapter inside a small stand-in of its host."""
from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# The small networks and the fresh runtime are theirs.
sys.path.append(str(Path(__file__).parent.with_name("unit")))

from contract_hosts import HOSTS, Host, running
from runtime_fixtures import fresh_runtime, no_machine_is_too_slow  # noqa: F401

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="stable-diffusion-sdkit is not installed")


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest, fresh_runtime: None) -> Iterator[Host]:  # noqa: F811
    """One host after the other; OneDiff has not been loaded in it yet."""
    with running(request.param) as made:
        yield made


@pytest.fixture
def tracebacks(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """tracebacks() counts those in the log."""
    # The script switches propagation off, and another test may have loaded it.
    monkeypatch.setattr(logging.getLogger("onediff"), "propagate", True)
    return lambda: sum(record.exc_info is not None for record in caplog.records)

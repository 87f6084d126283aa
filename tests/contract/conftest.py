"""Contract tests: each WebUI's adapter runs in a small stand-in of its WebUI."""
from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# These tests use the small networks and the fresh runtime of the unit tests.
sys.path.append(str(Path(__file__).parent.with_name("unit")))

from contract_hosts import HOSTS, Host, running
from runtime_fixtures import fresh_runtime, no_machine_is_too_slow  # noqa: F401

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="stable-diffusion-sdkit is not installed")


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest, fresh_runtime: None) -> Iterator[Host]:  # noqa: F811
    """Each WebUI in turn, before OneDiff is loaded in it."""
    with running(request.param) as made:
        yield made


@pytest.fixture
def tracebacks(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that returns the number of tracebacks in the log."""
    # If another test has loaded the script, it has switched propagation off.
    monkeypatch.setattr(logging.getLogger("onediff"), "propagate", True)
    return lambda: sum(record.exc_info is not None for record in caplog.records)

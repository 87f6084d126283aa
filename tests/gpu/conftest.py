"""Fixtures for the tests on a GPU. By default, calls are a warm-up, as in pre-warming: kernels are compiled and
measured before their first use."""
from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights.low_bit import KINDS_OF

# For the toy transformer in tests/unit.
sys.path.append(str(Path(__file__).parent.with_name("unit")))


@pytest.fixture(autouse=True)
def warming_up() -> Iterator[None]:
    with runtime.warming_up():
        yield


@pytest.fixture
def fresh_runtime() -> Iterator[None]:
    runtime.purge()
    yield
    runtime.release_memory()


@pytest.fixture
def tiny() -> Any:
    """A small SDXL UNet in float16."""
    import torch

    from lib_onediff.bench.models import random_unet

    return random_unet("tiny-sdxl", torch.device("cuda")).half()


@pytest.fixture
def unet() -> Iterator[Any]:
    """SD1.5's UNet in float16, served with the runtime's settings."""
    import torch

    from lib_onediff.bench.models import random_unet
    from lib_onediff.core.settings import Settings
    from lib_onediff.hosts.diffusers.unet import attach

    runtime.purge()
    unet = random_unet("sd15", torch.device("cuda")).half()
    attach(unet)
    yield unet
    for model, resolution in runtime.history.pins():
        runtime.history.pin(model, resolution, False)
    runtime.configure(Settings())
    runtime.release_all()
    runtime.purge()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of memory first. The memory of graphs depends on workspaces that matrix libraries keep after other
    tests, and on the attention kernels that were chosen in those tests."""
    items.sort(key=lambda item: item.path.name != "test_budget.py")


@pytest.fixture(params=list(KINDS_OF))
def option(request: pytest.FixtureRequest) -> Any:
    """A value of Settings.low_bit that this GPU supports. Skips the test for the others."""
    import torch

    lack = runtime.devices.lossy.low_bit.why_not(request.param, torch.device("cuda"), torch.float16)
    if lack:
        pytest.skip(lack)
    return request.param

"""Tests of the OneFlow backend need an environment of their own: Python 3.10, oneflow 0.9.0, torch 2.4.1 (.ci/run makes
it).

In other environments each of them is skipped. The reason for the skip is the sentence that users read when OneFlow
cannot be used.
"""
from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lib_onediff.devices.oneflow.gate import OneFlowGate
from lib_onediff.runtime.runtime import runtime

HERE = Path(__file__).parent
# These tests use the small UNets of the unit tests.
sys.path.append(str(HERE.with_name("unit")))
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    reason = OneFlowGate().why_not(torch.device("cpu"), torch.float32) if ours else None
    for item in ours if reason else []:
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def gradients_are_off() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    runtime.purge()

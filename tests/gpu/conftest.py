"""On a GPU, tests wait for kernels that are being compiled: otherwise the host would serve their first calls."""
from __future__ import annotations

from collections.abc import Iterator

import pytest

from lib_onediff.runtime.runtime import runtime


@pytest.fixture(autouse=True)
def wait_for_compile() -> Iterator[None]:
    with runtime.wait_for_compile():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What other tests leave in torch's cache, in pieces, counts as room on a card that is to be full."""
    items.sort(key=lambda item: item.path.name != "test_budget.py")

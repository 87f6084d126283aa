"""Forge's main thread: here, functions run in the calling thread."""
from __future__ import annotations

from typing import Any


def run_and_wait_result(function: Any, *args: Any) -> Any:
    return function(*args)

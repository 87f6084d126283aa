"""Runs work in the calling thread, as if it were the main one."""
from __future__ import annotations

from typing import Any


def run_and_wait_result(function: Any, *args: Any) -> Any:
    return function(*args)

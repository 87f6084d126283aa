"""The processes that compile for Inductor end with the one that has started them, whatever they are doing."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lib_onediff.engines.inductor.helper import CannotCompile

ROOT = Path(__file__).resolve().parents[2]
SECONDS_TO_END = 120
# It is gone long before its helper has imported torch.
PARENT = """
import os, signal
from lib_onediff.engines.inductor.helper import start
from test_inductor_helpers import Endless
print(start([Endless()] * {count}).pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


class Endless:
    """Regions that take for ever."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        while True:
            time.sleep(0.1)
            yield Uncompilable(), ()


class Uncompilable:
    def __getattr__(self, name: str) -> Any:
        raise CannotCompile(name)


def is_alive(process: int) -> bool:
    try:
        # A zombie does nothing any more.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_of(process: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux shows them")
@pytest.mark.parametrize("count", [1, 2])
def test_helpers_end_with_a_parent_that_dies_during_their_import(count: int) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
    parent = subprocess.run(
        [sys.executable, "-c", PARENT.format(count=count)], env=environment, capture_output=True, text=True
    )
    helper = int(parent.stdout)
    assert parent.returncode == -signal.SIGKILL
    family = {helper}
    try:
        deadline = time.monotonic() + SECONDS_TO_END
        while any(map(is_alive, family)):
            assert time.monotonic() < deadline, "a helper has outlived its parent"
            family.update(*map(children_of, list(family)))
            time.sleep(0.1)
    finally:
        for process in filter(is_alive, family):
            os.kill(process, signal.SIGKILL)

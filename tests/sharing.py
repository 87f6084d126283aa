"""Distributes whole test files over pytest-xdist's worker processes: what the tests of a file share is prepared
once."""
from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parents[1]
# Files that open the OneDiff tab. All others that open a page take as many minutes together.
IN_THE_TAB = ("test_panel", "test_compare_tab", "test_accessibility")
TOGETHER = ("webui with a browser", "webui, its tab", "webui")
# Files that take half a minute or more. They come before the short ones, so that none of them is alone at the end.
LONG = (
    "test_bench", "test_vae", "test_unet", "test_kernel", "test_native", "test_api", "test_deepcache",
    "test_standalone", "test_graph", "test_install", "test_every_function",
)


class Sharing(LoadScopeScheduling):
    """Gives all tests of a unit (unit_of) to one process: a file, or a group of files that share a WebUI. conftest
    sorts the files by turn(): tests with a browser, which mostly wait; tests of the OneDiff tab; other tests of a
    WebUI; long tests; all others. Each of the first three groups is one unit."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid.partition("::")[0])


@cache
def unit_of(file: str) -> str:
    """The name of the unit that a file belongs to. A unit's tests run in one process."""
    name = file.rpartition("/")[2]
    if "/webui/" in f"/{file}":
        if name.startswith(IN_THE_TAB):
            return "webui, its tab"
        return "webui with a browser" if opens_a_page(ROOT / file) else "webui"
    return file


def turn(file: str) -> int:
    """The sort key of a file, for the order that Sharing describes."""
    unit = unit_of(file)
    if unit in TOGETHER:
        return TOGETHER.index(unit)
    return len(TOGETHER) if file.rpartition("/")[2].startswith(LONG) else len(TOGETHER) + 1


def opens_a_page(file: Path) -> bool:
    """Whether the tests of a file use a browser."""
    return re.search(r"\b(browser|panel)\b", file.read_text(encoding="utf-8")) is not None

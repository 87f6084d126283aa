"""Distributes tests over processes by files, so that work that a file prepares is done once."""
from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parents[1]
# These open the OneDiff tab. Other files open a page too, and take as many minutes.
IN_THE_TAB = ("test_panel", "test_compare_tab", "test_accessibility")
TOGETHER = ("webui with a browser", "webui, its tab", "webui")
# Each takes half a minute or more, so none of them may begin when nothing is left for the other processes.
LONG = (
    "test_bench", "test_vae", "test_unet", "test_kernel", "test_native", "test_api", "test_deepcache",
    "test_standalone", "test_graph", "test_install", "test_every_function",
)


class Sharing(LoadScopeScheduling):
    """Hands out files: first those in a browser, which mostly wait, those of the OneDiff tab and the others; then all
    others of a WebUI. Each of these groups goes to one process, which shares a WebUI. Then long tests, and then the
    rest."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid.partition("::")[0])


@cache
def unit_of(file: str) -> str:
    """The unit that is handed out for a test."""
    name = file.rpartition("/")[2]
    if "/webui/" in f"/{file}":
        if name.startswith(IN_THE_TAB):
            return "webui, its tab"
        return "webui with a browser" if opens_a_page(ROOT / file) else "webui"
    return file


def turn(file: str) -> int:
    """The order in which a file's tests are handed out, lowest first."""
    unit = unit_of(file)
    if unit in TOGETHER:
        return TOGETHER.index(unit)
    return len(TOGETHER) if file.rpartition("/")[2].startswith(LONG) else len(TOGETHER) + 1


def opens_a_page(file: Path) -> bool:
    return re.search(r"\b(browser|panel)\b", file.read_text(encoding="utf-8")) is not None

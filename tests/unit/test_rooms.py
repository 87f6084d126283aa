"""Imports run downwards: between the folders of lib_onediff in one order, and between its files without a circle."""
from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[2] / "lib_onediff"
# A room is a folder of lib_onediff, or a file directly in it. Each may import those before it.
ROOMS = (
    "core", "families", "weights", "devices", "store", "steps", "runtime", "hosts", "prewarm",
    "public", "api", "ui", "demo", "serving", "bench", "__init__",
)

def room_of(file: str) -> str:
    return file.split("/")[0]


def imports_of(file: str, source: str, files: set[str]) -> Iterator[str]:
    """The files that a file imports, also in functions and for type checkers."""
    package = file.split("/")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            # The code below finds relative imports and "from lib_onediff.x import y" only.
            assert not any(alias.name.split(".")[0] == LIBRARY.name for alias in node.names), file
        if not isinstance(node, ast.ImportFrom):
            continue
        absolute = (node.module or "").split(".") if node.module else []
        if node.level:
            base = [*package[: len(package) - node.level + 1], *absolute]
        elif absolute[0] == LIBRARY.name:
            base = absolute[1:]
        else:
            continue
        for alias in node.names:
            yield next(found for found in (
                "/".join([*base, alias.name]), "/".join([*base, alias.name, "__init__"]), "/".join(base),
                "/".join([*base, "__init__"]),
            ) if found in files)


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    sources = {
        path.relative_to(LIBRARY).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
        for path in LIBRARY.rglob("*.py")
    }
    return {file: set(imports_of(file, source, set(sources))) - {file} for file, source in sources.items()}


def test_rooms_import_only_rooms_below_them(imports: dict[str, set[str]]) -> None:
    assert {room_of(file) for file in imports} == set(ROOMS), "the list of rooms is not that of the folders"
    upwards = [
        f"{file} imports {imported}" for file, targets in imports.items() for imported in targets
        if ROOMS.index(room_of(imported)) > ROOMS.index(room_of(file))
    ]
    assert not upwards


def test_no_files_import_each_other_in_a_circle(imports: dict[str, set[str]]) -> None:
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"imported in a circle: {' <- '.join(error.args[1])}")

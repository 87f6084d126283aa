"""Imports within lib_onediff: its folders import only folders before them in a fixed order, and no files import each
other in a cycle."""
from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[2] / "lib_onediff"
# The folders of lib_onediff, and the files directly in it. Each may import those before it.
FOLDERS = (
    "core", "families", "weights", "devices", "store", "steps", "runtime", "hosts", "prewarm",
    "public", "api", "ui", "demo", "serving", "bench", "__init__",
)


def folder_of(file: str) -> str:
    """The folder directly in lib_onediff that has the file, or the file's own name."""
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
    """The files that each file of lib_onediff imports."""
    sources = {
        path.relative_to(LIBRARY).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
        for path in LIBRARY.rglob("*.py")
    }
    return {file: set(imports_of(file, source, set(sources))) - {file} for file, source in sources.items()}


def test_folders_of_lib_onediff_import_only_folders_before_them(imports: dict[str, set[str]]) -> None:
    assert {folder_of(file) for file in imports} == set(FOLDERS), "FOLDERS is not the list of the folders"
    upwards = [
        f"{file} imports {imported}" for file, targets in imports.items() for imported in targets
        if FOLDERS.index(folder_of(imported)) > FOLDERS.index(folder_of(file))
    ]
    assert not upwards


def test_no_files_import_each_other_in_a_cycle(imports: dict[str, set[str]]) -> None:
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"imported in a cycle: {' <- '.join(error.args[1])}")

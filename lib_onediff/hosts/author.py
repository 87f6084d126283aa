"""Whose code runs, in words for the user."""
from __future__ import annotations

from functools import lru_cache
from pathlib import PurePath

from ..model.patches import origin, underlying

FOLDERS = ("extensions", "extensions-builtin")


def author(function: object) -> str:
    """The folder of the extension whose code a function runs; the Python module, where it is in none. All extensions
    have a package that is called scripts."""
    code = getattr(underlying(function), "__code__", None)
    return (code and extension_of(code.co_filename)) or origin(function)


@lru_cache(maxsize=256)
def extension_of(path: str) -> str:
    parts = PurePath(path).parts
    return next((name for folder, name in zip(parts, parts[1:-1], strict=False) if folder in FOLDERS), "")

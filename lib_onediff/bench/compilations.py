"""Count the Triton kernels that are built while something runs."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class Compilations:
    """count: kernels that were compiled, or read from Triton's cache on the disk, since this process had not used
    them in that form before. None: this Triton does not tell, or there is none."""

    count: int | None = None


@contextlib.contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Counts while the body runs."""
    counted = Compilations()
    place = hook_place()
    if place is None:
        yield counted
        return
    owner, name = place
    before: Callable[..., Any] | None = getattr(owner, name)
    counted.count = 0

    def hook(*args: Any, **kwargs: Any) -> Any:
        counted.count = (counted.count or 0) + 1
        return None if before is None else before(*args, **kwargs)

    setattr(owner, name, hook)
    try:
        yield counted
    finally:
        setattr(owner, name, before)


def hook_place() -> tuple[Any, str] | None:
    """Where this Triton takes a function that it calls for every kernel that it has to build: (object, attribute)."""
    try:
        import triton
    except ImportError:
        return None
    settings = getattr(getattr(triton, "knobs", None), "runtime", None)
    if hasattr(settings, "jit_post_compile_hook"):
        return settings, "jit_post_compile_hook"
    for name in ("compiled_hook", "cache_hook"):  # before Triton 3.4
        if hasattr(triton.JITFunction, name):
            return triton.JITFunction, name
    return None

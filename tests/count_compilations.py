"""How many kernels Triton compiles meanwhile."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class Compilations:
    """count: kernels that were compiled, or read from Triton's cache on the disk; None without Triton."""

    count: int | None = None


@contextlib.contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Counts while the body runs, by the hook that Triton calls for every kernel that it builds."""
    try:
        import triton
    except ImportError:
        yield Compilations()
        return
    settings: Any = getattr(getattr(triton, "knobs", None), "runtime", None)
    # Triton 3.4 and newer, and before.
    new = hasattr(settings, "jit_post_compile_hook")
    owner, name = (settings, "jit_post_compile_hook") if new else (triton.JITFunction, "compiled_hook")
    before, counted = getattr(owner, name), Compilations(0)

    def hook(*args: Any, **kwargs: Any) -> Any:
        counted.count = (counted.count or 0) + 1
        return None if before is None else before(*args, **kwargs)

    setattr(owner, name, hook)
    try:
        yield counted
    finally:
        setattr(owner, name, before)

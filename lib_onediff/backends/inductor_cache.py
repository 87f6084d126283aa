"""What lies beside Inductor's caches on the disk: which regions are in them, and what it takes to read them."""
from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
import sys
from pathlib import Path

import torch

from ..ops.availability import triton_version
from ..ops.compiled import CompiledRegion
from ..ops.regions import Shapes

log = logging.getLogger("onediff")

Work = tuple[CompiledRegion, Shapes]
NOTES, MODULES = "onediff-regions", "modules"
COMPILERS = ("torch.", "triton.", "sympy.", "mpmath.")


def is_noted(compiled: CompiledRegion, shapes: Shapes) -> bool:
    """Whether a region was compiled on this machine before, so that it can be read."""
    return note_of(compiled, shapes).exists()


def note(compiled: CompiledRegion, shapes: Shapes) -> None:
    write(note_of(compiled, shapes), "")


def note_modules() -> None:
    """Remember what this process, which has compiled, has imported for it."""
    write(folder() / MODULES, "\n".join(name for name in sorted(sys.modules) if name.startswith(COMPILERS)))


def import_compiler() -> None:
    """Import Inductor, and what it imports when it first works on this machine, which takes more than a second each."""
    import torch._inductor.compile_fx  # noqa: F401

    with contextlib.suppress(OSError):
        for name in (folder() / MODULES).read_text().splitlines():
            # Another version of them may lack some.
            if name.startswith(COMPILERS):
                with contextlib.suppress(Exception):
                    importlib.import_module(name)


def note_of(compiled: CompiledRegion, shapes: Shapes) -> Path:
    sizes = hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]
    return folder() / f"{compiled.region.digest}-{sizes}"


def folder() -> Path:
    return Path(caches(), NOTES, f"{torch.__version__}-{triton_version()}".replace("+", "-"))


def caches() -> str:
    """Inductor's folder; to import Inductor for that takes a second, so not where the folder was chosen by us."""
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if chosen:
        return chosen
    from torch._inductor.codecache import cache_dir

    return cache_dir()


def write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        log.debug("the caches of Inductor cannot be noted: %s", error)

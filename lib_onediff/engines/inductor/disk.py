"""Where compiled regions are on the disk, which of them may be run, and what it takes to read them."""
from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
import platform
import sys
from pathlib import Path

import torch

from ...ops.availability import triton_version
from ...ops.inductor.artifact import CODE, IN_STORE, digest_of, write
from ...ops.inductor.regions import Region, Shapes
from ...ops.tuning_cache import TuningCache
from ...store.machine import source_digest

log = logging.getLogger("onediff")

NOTES, MODULES = "onediff-regions", "modules"
COMPILERS = ("torch.", "triton.", "sympy.", "mpmath.")


class Vouched:
    """The digests of what this machine has compiled, kept with what was measured on it. Files alone prove nothing:
    what is read from them is run."""

    def __init__(self, tuning_cache: TuningCache) -> None:
        self._tuning_cache = tuning_cache

    def digest(self, path: Path) -> str | None:
        """That of the code that may be read from a path; None: none may."""
        known = self._tuning_cache.get(self._name(path))
        return known if isinstance(known, str) else None

    def vouch(self, path: Path, digest: str | None) -> None:
        """Remember what is there now; None: nothing, or nothing that could be kept."""
        # Also what is known already: the store may have been purged since.
        if digest is not None:
            self._tuning_cache.set(self._name(path), digest)

    def clear_away(self, path: Path) -> bool:
        """Delete what lies at a path and nobody vouches for, and say so in the log. Returns whether nothing may be read
        there."""
        found = digest_of(path)
        if found is not None and found == self.digest(path):
            return False
        if path.exists():
            log.warning("%s is compiled anew: it is not what OneDiff has noted in its store.", path)
            for file in (path, Path(f"{path}{CODE}")):
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)
        return True

    def _name(self, path: Path) -> str:
        return f"{IN_STORE}{path.name}"


def note_modules() -> None:
    """Remember what this process has imported to read what was compiled."""
    path = folder() / MODULES
    if not path.exists():
        write(path, "\n".join(name for name in sorted(sys.modules) if name.startswith(COMPILERS)))


def import_compiler() -> None:
    """Import Inductor, with what reading took the last time on this machine: seconds, once in a process."""
    import torch._inductor.compile_fx  # noqa: F401

    with contextlib.suppress(OSError):
        for name in (folder() / MODULES).read_text().splitlines():
            # Another version of them may lack some.
            if name.startswith(COMPILERS):
                with contextlib.suppress(Exception):
                    importlib.import_module(name)


def look_around(device: torch.device) -> None:
    """Find out what Inductor asks once in a process before it reads anything, where that is not Python's own work."""
    from torch._inductor.codecache import torch_key

    torch_key()
    if device.type == "cpu":
        # torch 2.4 has it elsewhere.
        with contextlib.suppress(ImportError):
            from torch._inductor.cpu_vec_isa import pick_vec_isa

            pick_vec_isa()


def path_of(region: Region, shapes: Shapes) -> Path:
    """Where a region is kept that was compiled with inputs of these shapes in mind."""
    exact = f"{shapes} {processor(region.device)}"
    return folder() / f"{region.digest}-{short(exact.encode())}"


def processor(device: torch.device) -> str:
    """For which processor code is made, and on a CPU for how many threads."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    threads = str(torch.get_num_threads())
    with contextlib.suppress(OSError):
        # Linux only tells it here. One line for each thing that a kind of processor can do.
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        return "\n".join([*(line for line in lines if line.startswith(("model name", "flags", "Features"))), threads])
    return f"{platform.processor()}\n{threads}"


def folder() -> Path:
    return Path(caches(), NOTES, f"{torch.__version__}-{triton_version()}-{source_digest()}".replace("+", "-"))


def short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


def caches() -> str:
    """Inductor's folder; to import Inductor for that takes a second, so not where the folder was chosen by us."""
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if chosen:
        return chosen
    from torch._inductor.codecache import cache_dir

    return cache_dir()

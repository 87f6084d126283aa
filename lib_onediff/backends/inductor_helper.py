"""Compile regions in processes of their own, for Inductor's caches on the disk."""
from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..ops.compiled import CompiledRegion, Compiler
from ..ops.regions import Region, Shapes

log = logging.getLogger("onediff")

Share = list[tuple[Region, Shapes]]
REGIONS_FOR_A_HELPER = 4
HELPER_LIMIT_S = 600
PACKAGE_FOLDER = Path(__file__).resolve().parents[2]
LOW_PRIORITY = 10
# Or each would start a pool of processes when it imports Inductor, as many as there are cores.
ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
SWITCHES = ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


def compile_in_processes(regions: Share, most: int, meanwhile: Callable[[], object]) -> None:
    """Have regions compiled, in at most so many processes; what they leave undone, the calls do.

    meanwhile: is called while they work.
    """
    count = min(most, -(-len(regions) // REGIONS_FOR_A_HELPER))
    # Neighbours are alike: dealt out in turns, each helper has as much to do.
    helpers = [start(regions[index::count]) for index in range(count)]
    meanwhile()
    for helper in helpers:
        if helper is not None:
            wait_for(helper)


def start(share: Share) -> subprocess.Popen[bytes] | None:
    """A process that compiles a share, or None where none can be started."""
    command = [sys.executable, "-m", __name__]
    folders = [str(PACKAGE_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        helper = subprocess.Popen(
            command, env={**os.environ, **ALONE, "PYTHONPATH": os.pathsep.join(folders)}, stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        helper.stdin.write(pickle.dumps((switches(), share)))
        helper.stdin.close()
    except OSError as error:
        log.debug("no process to compile in: %s", error)
        return None
    return helper


def switches() -> dict[str, Any]:
    """What of torch's state is part of what Inductor compiles."""
    matmul = torch.backends.cuda.matmul
    names = [name for name in SWITCHES if hasattr(matmul, name)]
    return {"threads": torch.get_num_threads(), **{name: getattr(matmul, name) for name in names}}


def switch(values: dict[str, Any]) -> None:
    """Have this process as switches() has found another."""
    torch.set_num_threads(values["threads"])
    for name in SWITCHES:
        # Newer torch takes note of being told what it has done anyway, and compiles anew.
        if name in values and getattr(torch.backends.cuda.matmul, name) != values[name]:
            setattr(torch.backends.cuda.matmul, name, values[name])


def wait_for(helper: subprocess.Popen[bytes]) -> None:
    try:
        helper.wait(HELPER_LIMIT_S)
    except subprocess.TimeoutExpired:
        helper.kill()
        helper.wait()
    log.debug("a process that compiled has ended with %s", helper.returncode)


def main() -> int:
    """Compile what comes pickled by the standard input, from start() and nobody else; 0 if that was done.

    Raises CannotCompile, which nobody reads: who has started this will find out.
    """
    from .inductor import compile_region
    from .inductor_cache import note_modules

    if hasattr(os, "nice"):
        os.nice(LOW_PRIORITY)
    compiler = Compiler()
    values, share = pickle.load(sys.stdin.buffer)
    switch(values)
    parent = os.getppid()
    for region, shapes in share:
        if os.getppid() != parent:
            # Nobody waits for this any more, and the next process starts helpers of its own.
            return 1
        compile_region(CompiledRegion(region, compiler), shapes)
    note_modules()
    return 0


if __name__ == "__main__":
    sys.exit(main())

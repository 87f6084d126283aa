"""Compile regions in processes of their own, for Inductor's caches on the disk."""
from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from ...ops.inductor.compiled import CompiledRegion
from ...ops.inductor.regions import Region, Shapes
from ...ops.inductor.traced import said_by
from ...ops.precision import our_modes
from .disk import import_compiler, path_of

log = logging.getLogger("onediff")

Share = list[tuple[Region, Shapes]]
REGIONS_FOR_A_HELPER = 4
HELPER_LIMIT_S = 600
PACKAGE_FOLDER = Path(__file__).resolve().parents[3]
LOW_PRIORITY = 10
# Or each would start a pool of processes when it imports Inductor, as many as there are cores.
ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
# Or torch, asked whether there is a GPU, uses it, and cannot be copied any more.
UNUSED_GPU = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
SWITCHES = ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


class CannotCompile(RuntimeError):
    """Inductor has failed on a region; the message says how, in one line for the user."""


def compile_region(compiled: CompiledRegion, shapes: Shapes, digest: str | None = None) -> str | None:
    """Compile a region, or read it, where what is on the disk has this digest. Returns the digest of what is there now.
    Raises CannotCompile."""
    try:
        with our_modes(compiled.region.device), on(compiled.region.device):
            return compiled.compile(shapes, path_of(compiled.region, shapes), digest)
    except Exception as error:
        log.debug("Inductor failed", exc_info=True)
        raise CannotCompile(f"Inductor could not compile its {compiled.region.kind}: {said_by(error)}") from error


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def compile_in_processes(regions: Share, most: int) -> None:
    """Have regions compiled, in at most so many processes; what they leave undone, the calls do."""
    count = min(most, -(-len(regions) // REGIONS_FOR_A_HELPER))
    # Neighbours are alike: dealt out in turns, each process has as much to do.
    shares = [regions[index::count] for index in range(count)]
    # To import a compiler takes as long as to compile three regions: where a process can be copied, one does that.
    helpers = [start(shares)] if hasattr(os, "fork") and shares else [start([share]) for share in shares]
    for helper in helpers:
        if helper is not None:
            wait_for(helper)


def start(shares: list[Share]) -> subprocess.Popen[bytes] | None:
    """A process that compiles shares at the same time, or None where none can be started."""
    # __name__ is another one in the process that this starts.
    command = [sys.executable, "-m", f"{__package__}.{Path(__file__).stem}"]
    folders = [str(PACKAGE_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        helper = subprocess.Popen(
            command, env={**os.environ, **ALONE, **UNUSED_GPU, "PYTHONPATH": os.pathsep.join(folders)},
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        assert helper.stdin is not None, "it is a pipe"
        helper.stdin.write(pickle.dumps((switches(), shares)))
        # It stays open as long as this process lives.
        helper.stdin.flush()
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
    if helper.stdin is not None:
        helper.stdin.close()
    log.debug("a process that compiled has ended with %s", helper.returncode)


def main() -> int:
    """Compile what comes pickled by the standard input, from start() and nobody else; 0 if that was done.

    What cannot be compiled is left undone, and told by the call that tries again.
    """
    if hasattr(os, "nice"):
        os.nice(LOW_PRIORITY)
    values, shares = pickle.load(sys.stdin.buffer)
    # A copy closes its standard input.
    end = os.dup(sys.stdin.fileno())
    watch(end)
    import_compiler()
    if len(shares) == 1:
        switch(values)
        compile_share(shares[0])
        return 0
    copied = multiprocessing.get_context("fork")
    copies = [copied.Process(target=compile_as_copy, args=(one, values, end)) for one in shares]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.join()
    return 0


def watch(end: int) -> None:
    """End this process with the one that has started it: nobody waits for it then, and the next starts helpers anew.

    end: of the pipe that the other holds open as long as it lives.
    """

    def wait() -> None:
        os.read(end, 1)
        os._exit(1)

    threading.Thread(target=wait, name="onediff-parent", daemon=True).start()


def compile_as_copy(share: Share, values: dict[str, Any], end: int) -> None:
    """In a copy of a process that has not used its GPU; where torch takes it for one that has, in a process anew."""
    watch(end)
    switch(values)
    if torch.cuda._is_in_bad_fork():
        helper = start([share])
        if helper is not None:
            wait_for(helper)
        return
    compile_share(share)


def compile_share(share: Share) -> None:
    for region, shapes in share:
        with contextlib.suppress(CannotCompile):
            compile_region(CompiledRegion(region), shapes)


if __name__ == "__main__":
    sys.exit(main())

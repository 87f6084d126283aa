"""Our kernels as they were compiled ahead, to PTX: kernels.zip beside this, which .ci/kernels writes.

A kernel has a variant for each set of types, block sizes and warps, and for some architectures: the newest serves that
the card has. PTX is text that NVIDIA's driver translates for any newer card; what it translated it keeps on the disk.
"""
from __future__ import annotations

import functools
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ....core.refusal import Refusal
from ....core.version import written

ARCHIVE, MANIFEST = Path(__file__).with_name("kernels.zip"), "manifest.json"
OLDEST_CAPABILITY = (7, 5)
# The CUDA of the driver's release 525, which loads PTX 8.0; and where an architecture's needs newer PTX: 8.4 and 8.6.
OLDEST_DRIVER, OLDEST_DRIVER_NAME = (12, 0), "525"
NEWER_DRIVER = {"89": (12, 4), "90a": (12, 7)}
TYPE_NAMES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int8: "i8", torch.int64: "i64",
    getattr(torch, "float8_e4m3fn", None): "fp8e4nv",
}


class Tiles(NamedTuple):
    """A contiguous tensor that a kernel loads or stores in blocks of a shape."""

    tensor: torch.Tensor
    block: tuple[int, ...]


class Variant(NamedTuple):
    """A kernel, compiled. file, start, bytes: where in the archive. name: within the PTX. arguments: a letter for each,
    see launching. maps: for each of its tiles that the card copies by itself, item's bytes, type, swizzle and box."""

    file: str
    start: int
    bytes: int
    name: str
    threads: int
    shared: int
    arguments: str
    maps: Sequence[Any]


def key_of(
    kernel: str, arguments: Sequence[Any], warps: int, stages: int, constants: Mapping[str, int]
) -> tuple[Any, ...]:
    """What tells the variants of a kernel apart."""
    types = (
        argument.dtype if isinstance(argument, torch.Tensor)
        else (argument.tensor.dtype, argument.block) if isinstance(argument, Tiles) else None
        for argument in arguments
    )
    return (kernel, *types, warps, stages, *constants.values())


def key_name(key: tuple[Any, ...]) -> str:
    """As the archive has it."""
    def name(part: Any) -> str:
        if isinstance(part, tuple):
            return f"{name(part[0])}[{'x'.join(map(str, part[1]))}]"
        if isinstance(part, torch.dtype):
            return TYPE_NAMES.get(part, str(part))
        return str(int(part) if isinstance(part, bool) else part)

    return " ".join(name(part) for part in key if part is not None)


def variant(
    key: tuple[Any, ...], capability: tuple[int, int], driver: tuple[int, int]
) -> tuple[Variant, bytes]:
    """For a card and the CUDA that its driver serves, with its PTX. Raises Refusal where there is none."""
    name = key_name(key)
    by_architecture = manifest()["kernels"].get(name, {})
    serving = [
        one for one in by_architecture if serves(one, capability) and driver >= NEWER_DRIVER.get(one, OLDEST_DRIVER)
    ]
    if not serving:
        card = f"compute capability {written(capability)} and a driver for CUDA {written(driver)}"
        raise Refusal(f"OneDiff has no kernel “{name}” for {card}")
    found = Variant(*by_architecture[max(serving, key=number)])
    return found, text_of(found.file)[found.start:found.start + found.bytes] + b"\0"


def serves(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether PTX for an architecture, "80" or "90a", runs on a card; an "a" is for cards of just that one."""
    own = capability[0] * 10 + capability[1]
    return number(architecture) == own if architecture.endswith("a") else number(architecture) <= own


def number(architecture: str) -> int:
    return int(architecture.rstrip("a"))


@functools.cache
def manifest() -> Any:
    """digest: of the sources. kernels: by their keys' names, a Variant for each architecture. Raises Refusal where the
    archive cannot be read."""
    try:
        with zipfile.ZipFile(ARCHIVE) as archive:
            return json.loads(archive.read(MANIFEST))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise Refusal(f"OneDiff's kernels cannot be read ({error}): install it anew") from None


@functools.lru_cache(maxsize=16)
def text_of(file: str) -> bytes:
    with zipfile.ZipFile(ARCHIVE) as archive:
        return archive.read(file)

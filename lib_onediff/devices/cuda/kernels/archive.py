"""Our kernels as they were compiled ahead, to PTX: kernels.zip beside this, which .ci/kernels writes.

A kernel has a variant for each set of types, block sizes and warps, and for some architectures: the newest serves that
the card has. PTX is text that NVIDIA's driver translates for any newer card; what it translated it keeps on the disk.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ....core.refusal import Refusal
from ....core.version import written

ARCHIVE = Path(__file__).with_name("kernels.zip")
MANIFEST = "manifest.json"
SOURCES = ARCHIVE.with_name("source")
# What reading a damaged archive raises: it is cut off, a member lacks or is another, its bytes are.
DAMAGE = (
    OSError, EOFError, KeyError, IndexError, ValueError, TypeError, AttributeError, RecursionError, NotImplementedError,
    RuntimeError, zipfile.BadZipFile, zlib.error, struct.error,
)
OLDEST_CAPABILITY = (7, 5)
# The CUDA of the driver's release 525, which loads PTX 8.0; and where an architecture's needs newer PTX: 8.4 and 8.6.
OLDEST_DRIVER = (12, 0)
OLDEST_DRIVER_NAME = "525"
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


class Manifest(NamedTuple):
    """What the archive holds. digest: of the sources. kernels: by their keys' names, a Variant for each architecture.
    """

    digest: str
    kernels: Mapping[str, Mapping[str, Variant]]


def key_of(
    kernel: str, arguments: Sequence[Any], warps: int, stages: int, constants: Mapping[str, int]
) -> tuple[Any, ...]:
    """What tells the variants of a kernel apart."""
    return (kernel, *map(type_of, arguments), warps, stages, *constants.values())


def type_of(argument: Any) -> Any:
    """What of an argument decides which variant of a kernel takes it."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype
    return (argument.tensor.dtype, argument.block) if isinstance(argument, Tiles) else None


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
    by_architecture = manifest().kernels.get(name, {})
    serving = [
        one for one in by_architecture if serves(one, capability) and driver >= NEWER_DRIVER.get(one, OLDEST_DRIVER)
    ]
    if not serving:
        card = f"compute capability {written(capability)} and a driver for CUDA {written(driver)}"
        raise Refusal(f"OneDiff has no kernel “{name}” for {card}")
    found = by_architecture[max(serving, key=number)]
    return found, text_of(found.file)[found.start:found.start + found.bytes] + b"\0"


def serves(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether PTX for an architecture, "80" or "90a", runs on a card; an "a" is for cards of just that one."""
    own = capability[0] * 10 + capability[1]
    return number(architecture) == own if architecture.endswith("a") else number(architecture) <= own


def number(architecture: str) -> int:
    return int(architecture.rstrip("a"))


@functools.cache
def manifest() -> Manifest:
    """What the archive holds. Raises Refusal where it cannot be read."""
    with opened() as archive:
        content = json.loads(archive.read(MANIFEST))
        sizes = {member.filename: member.file_size for member in archive.infolist()}
        kernels = {
            key: {architecture: variant_of(given, sizes) for architecture, given in variants.items()}
            for key, variants in content["kernels"].items()
        }
        return Manifest(str(content["digest"]), kernels)


def variant_of(given: Any, sizes: Mapping[str, int]) -> Variant:
    """A variant as the manifest has it. sizes: of the archive's files. Raises ValueError and TypeError where that
    cannot be one."""
    found = Variant(*given)
    numbers = found.start, found.bytes, found.threads, found.shared
    texts = (found.file, found.name, found.arguments)
    maps = found.maps
    if not all(type(one) is int and one >= 0 for one in numbers) or not all(type(one) is str for one in texts):
        raise ValueError(f"{given} is no kernel")
    if found.start + found.bytes > sizes.get(found.file, 0) or found.arguments.count("T") != len(maps):
        raise ValueError(f"the kernel {found.name} is not whole")
    return found


@functools.lru_cache(maxsize=16)
def text_of(file: str) -> bytes:
    """All PTX of a kernel for an architecture. Raises Refusal where the archive cannot be read."""
    with opened() as archive:
        return archive.read(file)


@contextlib.contextmanager
def opened() -> Iterator[zipfile.ZipFile]:
    """The archive. Raises Refusal for what a damaged one raises inside."""
    try:
        with zipfile.ZipFile(ARCHIVE) as archive:
            yield archive
    except DAMAGE as error:
        what = str(error) or type(error).__name__
        raise Refusal(f"OneDiff's kernels cannot be read ({what}): install it anew") from None


def check_sources() -> None:
    """Raise Refusal where the archive was built from other sources than those beside it: they take other arguments."""
    if manifest().digest != digest_of_sources():
        raise Refusal("OneDiff's kernels are another version's: install it anew")


@functools.cache
def digest_of_sources() -> str:
    """Of the kernels' sources. Line ends are git's."""
    files = sorted(SOURCES.glob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes().replace(b"\r\n", b"\n") for path in files)).hexdigest()

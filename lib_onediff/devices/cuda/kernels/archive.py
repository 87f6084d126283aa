"""Finds compiled kernels in the archive kernels.zip, which .ci/kernels writes to the folder of this file.

The archive contains PTX, the assembly language that NVIDIA's driver translates for the card and for any newer one. The
driver caches its translations on the disk. A kernel has one variant for each set of dtypes, block sizes and warps, and
each variant was compiled for some architectures. A card uses the newest architecture that it supports.
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

# The archive, its member with the manifest, and the folder of the sources that were compiled.
ARCHIVE = Path(__file__).with_name("kernels.zip")
MANIFEST = "manifest.json"
SOURCES = ARCHIVE.with_name("source")
# The exceptions that reading a damaged archive raises: a truncated one, or one whose members are missing, exchanged or
# changed.
DAMAGE = (
    OSError, EOFError, KeyError, IndexError, ValueError, TypeError, AttributeError, RecursionError, NotImplementedError,
    RuntimeError, zipfile.BadZipFile, zlib.error, struct.error,
)
# The oldest compute capability for which kernels are compiled.
OLDEST_CAPABILITY = (7, 5)
# The CUDA version of driver 525, the first that loads PTX 8.0; and, for each architecture whose PTX is newer (8.4 and
# 8.6), that of the first driver that loads it.
OLDEST_DRIVER = (12, 0)
OLDEST_DRIVER_NAME = "525"
NEWER_DRIVER = {"89": (12, 4), "90a": (12, 7)}
# The names of dtypes in the archive's keys, which are Triton's.
TYPE_NAMES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int8: "i8", torch.int64: "i64",
    getattr(torch, "float8_e4m3fn", None): "fp8e4nv",
}


class Tiles(NamedTuple):
    """A contiguous tensor that a kernel loads or stores in blocks of this shape."""

    tensor: torch.Tensor
    block: tuple[int, ...]


class Variant(NamedTuple):
    """A compiled variant of a kernel for one architecture.

    file, start, bytes: the member of the archive that has the PTX, the index of the PTX's first byte in it, and the
        PTX's number of bytes.
    name: the name of the kernel's function in the PTX.
    threads: the number of threads in a block.
    shared: the bytes of shared memory of a block.
    arguments: one letter for each argument; see launching.FORMATS.
    maps: for each argument that is Tiles, (bytes of an item, dtype, swizzle, box), as Driver.tensor_map takes them.
    """

    file: str
    start: int
    bytes: int
    name: str
    threads: int
    shared: int
    arguments: str
    maps: Sequence[Any]


class Manifest(NamedTuple):
    """The contents of the archive.

    digest: the digest of the sources that were compiled; see digest_of_sources.
    kernels: for the key_name of each variant, the Variant for each architecture, such as "80" or "90a".
    """

    digest: str
    kernels: Mapping[str, Mapping[str, Variant]]


def key_of(
    kernel: str, arguments: Sequence[Any], warps: int, stages: int, constants: Mapping[str, int]
) -> tuple[Any, ...]:
    """The key of the variant of a kernel that takes these arguments: (kernel, the type_of each argument, warps, stages,
    the constants' values).

    constants: the values that the kernel is compiled for, by name. They must be in the order of its parameters, because
    the key does not have the names.
    """
    return (kernel, *map(type_of, arguments), warps, stages, *constants.values())


def type_of(argument: Any) -> Any:
    """The part of an argument that decides which variant of a kernel takes it: the dtype of a tensor, (dtype, block) of
    Tiles, and None for a number, because kernels are not compiled for numbers."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype
    return (argument.tensor.dtype, argument.block) if isinstance(argument, Tiles) else None


def key_name(key: tuple[Any, ...]) -> str:
    """The name of a variant in the archive: the parts of its key that are not None, separated by spaces.
    "tokens.gelu_block fp16 2 3 1024" has 2 warps, 3 stages and the constant 1024. Tiles are written as "fp16[128x64]",
    and a bool as 1 or 0."""
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
    """The variant with this key for the newest architecture that card and driver support, and its PTX, ending with a
    zero byte.

    capability: the card's compute capability. driver: the newest CUDA version that the driver supports. Raises Refusal
    if the archive cannot be read, does not have this key, or has it only for architectures that card or driver do not
    support.
    """
    name = key_name(key)
    by_architecture = manifest().kernels.get(name, {})
    serving = [
        one for one in by_architecture if serves(one, capability) and driver >= NEWER_DRIVER.get(one, OLDEST_DRIVER)
    ]
    if not serving:
        card = f"compute capability {written(capability)}, driver for CUDA {written(driver)}"
        if any(serves(one, capability) for one in by_architecture):
            raise Refusal(
                f"OneDiff's kernel “{name}” needs a newer NVIDIA driver than this one ({card}): update it; the image "
                "is right, only slower"
            )
        raise Refusal(f"OneDiff has no kernel “{name}” for this GPU ({card}); the image is right, only slower")
    found = by_architecture[max(serving, key=number)]
    return found, text_of(found.file)[found.start:found.start + found.bytes] + b"\0"


def serves(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether PTX for an architecture, such as "80" or "90a", runs on a card of this compute capability: on the same
    and on newer ones; with an "a" on the same one only."""
    own = capability[0] * 10 + capability[1]
    return number(architecture) == own if architecture.endswith("a") else number(architecture) <= own


def number(architecture: str) -> int:
    """The number in an architecture's name: 90 for "90a"."""
    return int(architecture.rstrip("a"))


@functools.cache
def manifest() -> Manifest:
    """The archive's manifest, read once. Raises Refusal if it cannot be read or is invalid; then the next call reads it
    again."""
    with opened() as archive:
        content = json.loads(archive.read(MANIFEST))
        sizes = {member.filename: member.file_size for member in archive.infolist()}
        kernels = {
            key: {architecture: variant_of(given, sizes) for architecture, given in variants.items()}
            for key, variants in content["kernels"].items()
        }
        return Manifest(str(content["digest"]), kernels)


def variant_of(given: Any, sizes: Mapping[str, int]) -> Variant:
    """The Variant that a list in the manifest describes. given: the values of Variant's fields, in order. sizes: the
    size of each of the archive's members, in bytes. Raises ValueError or TypeError if the list is invalid, or if the
    PTX lies outside of its member."""
    found = Variant(*given)
    numbers = found.start, found.bytes, found.threads, found.shared
    texts = (found.file, found.name, found.arguments)
    maps = found.maps
    if not all(type(one) is int and one >= 0 for one in numbers) or not all(type(one) is str for one in texts):
        raise ValueError(f"{given} is not a kernel")
    if found.start + found.bytes > sizes.get(found.file, 0) or found.arguments.count("T") != len(maps):
        raise ValueError(f"the kernel {found.name} is incomplete")
    return found


@functools.lru_cache(maxsize=16)
def text_of(file: str) -> bytes:
    """The content of a member of the archive (file): the PTX of all variants of a kernel for an architecture. The
    contents of the 16 members that were used last are kept in memory. Raises Refusal if the archive cannot be read."""
    with opened() as archive:
        return archive.read(file)


@contextlib.contextmanager
def opened() -> Iterator[zipfile.ZipFile]:
    """A context with the open archive. Any DAMAGE that is raised inside the context becomes a Refusal."""
    try:
        with zipfile.ZipFile(ARCHIVE) as archive:
            yield archive
    except DAMAGE as error:
        what = str(error) or type(error).__name__
        raise Refusal(
            f"OneDiff's compiled GPU code (kernels.zip) cannot be read ({what}): install OneDiff again"
        ) from None


def check_sources() -> None:
    """Raise Refusal if the archive cannot be read, or was not compiled from the present sources: then its kernels might
    take other arguments."""
    if manifest().digest != digest_of_sources():
        raise Refusal(
            "OneDiff's compiled GPU code (kernels.zip) belongs to another version of OneDiff: install OneDiff again"
        )


@functools.cache
def digest_of_sources() -> str:
    """The SHA-256 digest of the kernels' sources, in hexadecimal, computed once. Windows line ends (CRLF) count as LF,
    so that the digest is the same in every checkout."""
    files = sorted(SOURCES.glob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes().replace(b"\r\n", b"\n") for path in files)).hexdigest()

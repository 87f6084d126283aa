"""Launches a kernel on torch's current stream: a compiled one from the archive, or its source by Triton.

Triton is used for developing kernels (ONEDIFF_KERNELS=source), on AMD GPUs, and for Triton's interpreter on a CPU.
"""
from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from ....core.card import on_card
from ....core.refusal import Refusal
from ....core.version import written
from . import archive
from .archive import Tiles
from .driver import MAP_ALIGNMENT, MAP_BYTES, driver_here

# The usual depth of Triton's software pipeline.
STAGES = 3
# Kernels are compiled for addresses (in bytes) and sizes that are multiples of this, to load 16 bytes at once.
ALIGNED = 16
# The struct format of an argument by its letter in Variant.arguments. P: an address. I: an integer. A: an integer that
# is a multiple of ALIGNED. F: a float. S: the address of scratch memory, which none of our kernels uses. T, not here: a
# Tiles, which becomes several parameters.
FORMATS = {"P": "P", "I": "i", "A": "i", "F": "f", "S": "P"}
SCRATCH = "S"


def launch(
    kernel: str, grid: Sequence[int], *arguments: Any, warps: int, stages: int = STAGES, **constants: int
) -> None:
    """Launch a kernel on the current stream of its arguments' device, without waiting for it. A kernel that was not
    used before is loaded first; see loaded.

    kernel: "file.function" in source/. grid: the number of programs on up to three axes. arguments: tensors of one
    device, Tiles and numbers, the first of them a tensor or Tiles. warps: of a program. stages: the depth of Triton's
    software pipeline. constants: the kernel's compile-time constants (tl.constexpr), in the order of its parameters.

    Raises Refusal if there is no such kernel for these dtypes and constants or for this card, or if an address or a
    number is not a multiple of ALIGNED where the kernel needs that; RuntimeError with the driver's or Triton's reason;
    and torch.cuda.OutOfMemoryError.
    """
    first = arguments[0]
    device = (first.tensor if isinstance(first, Tiles) else first).device
    if not uses_archive(device):
        launch_source(kernel, grid, arguments, warps, stages, constants)
        return
    key = archive.key_of(kernel, arguments, warps, stages, constants)
    # A kernel belongs to the card that was current when it was loaded.
    with on_card(device):
        loaded(key, device)(grid, arguments)


def uses_archive(device: torch.device) -> bool:
    """Whether kernels for a device come from the archive, compiled ahead of time: on NVIDIA GPUs, unless
    ONEDIFF_KERNELS=source. Otherwise, Triton compiles the sources."""
    return device.type == "cuda" and not torch.version.hip and os.environ.get("ONEDIFF_KERNELS") != "source"


def why_not(device: torch.device) -> str | None:
    """Why our kernels cannot run on a device, in one sentence for the user; None if it meets all known requirements. It
    checks GPU, driver and archive, and launches nothing."""
    if device.type != "cuda":
        return f"OneDiff's kernels need an NVIDIA GPU, and this is the {device.type.upper()}"
    if not uses_archive(device):
        # On AMD GPUs, torch for ROCm usually comes with Triton.
        return None if find_spec("triton") else "OneDiff's kernels need Triton on this GPU, and it is not installed"
    capability = torch.cuda.get_device_capability(device)
    card = torch.cuda.get_device_name(device)
    if capability < archive.OLDEST_CAPABILITY:
        return (
            f"OneDiff's kernels need a GPU of compute capability {written(archive.OLDEST_CAPABILITY)} or higher, "
            f"such as GTX 16 and RTX 20, and the {card} has {written(capability)}"
        )
    try:
        archive.check_sources()
        version = driver_here().version()
    except (Refusal, RuntimeError) as reason:
        return str(reason)
    if version < archive.OLDEST_DRIVER:
        return (
            f"OneDiff's kernels need NVIDIA's driver {archive.OLDEST_DRIVER_NAME} or newer, for CUDA "
            f"{written(archive.OLDEST_DRIVER)}, and this one is for CUDA {written(version)}: update the driver"
        )
    return None


@functools.cache
def loaded(key: tuple[Any, ...], device: torch.device) -> Callable[[Sequence[int], Sequence[Any]], None]:
    """A function, run(grid, arguments), that launches the kernel with this key (archive.key_of) on the device's current
    stream. grid, arguments: as in launch.

    Loads the kernel from the archive, once for each key and device. That takes the driver some 50 ms if it has not
    translated the PTX before. The device must be the current one, now and whenever run is called. Raises as launch; run
    raises as launch too.
    """
    driver = driver_here()
    variant, ptx = archive.variant(key, torch.cuda.get_device_capability(device), driver.version())
    function = driver.load(ptx, variant.name, variant.shared)
    layout, offsets = layout_of(variant)
    threads = variant.threads
    shared = variant.shared
    letters = variant.arguments.rstrip(SCRATCH)
    scratch = [0] * variant.arguments.count(SCRATCH)

    def run(grid: Sequence[int], arguments: Sequence[Any]) -> None:
        maps = iter(variant.maps)
        values = list[Any]()
        for letter, argument in zip(letters, arguments, strict=True):
            if letter == "T":
                values += tiled(driver, argument, next(maps))
            elif letter == "P":
                values.append(aligned(argument.data_ptr(), variant.name))
            else:
                values.append(aligned(argument, variant.name) if letter == "A" else argument)
        stream = torch.cuda.current_stream(device).cuda_stream
        driver.launch(function, grid, threads, shared, stream, struct.pack(layout, *values, *scratch), offsets)

    return run


def aligned(number: int, name: str) -> int:
    """The given address or size, unchanged. Raises Refusal if it is not a multiple of ALIGNED, because the kernel would
    read wrong memory. name: the kernel's name in the message."""
    if number % ALIGNED:
        raise Refusal(
            f"OneDiff's fastest way cannot be used: its kernel {name} needs addresses and sizes that are multiples of "
            f"{ALIGNED}, not {number}; the image is right, only slower"
        )
    return number


def tiled(driver: Any, tiles: Tiles, given: Sequence[Any]) -> list[Any]:
    """The parameters that a kernel takes for one Tiles: the bytes of a tensor map, each size of the tensor, and each
    stride in items. given: the item of Variant.maps for this argument."""
    tensor = tiles.tensor
    item_bytes, dtype, swizzle, box = given
    shape = tensor.shape
    strides = tensor.stride()
    address = aligned(tensor.data_ptr(), "of tiles")
    return [driver.tensor_map(address, shape, strides, item_bytes, dtype, swizzle, box), *shape, *strides]


def layout_of(variant: archive.Variant) -> tuple[str, list[int]]:
    """The layout of a variant's parameters in memory: a format of struct.pack, and the byte at which each parameter
    begins."""
    layout = "@"
    offsets = list[int]()
    maps = iter(variant.maps)
    for letter in variant.arguments:
        formats: Sequence[str] = FORMATS.get(letter, "")
        if letter == "T":
            layout += f"{-struct.calcsize(layout) % MAP_ALIGNMENT}x"
            rank = len(next(maps)[3])
            formats = [f"{MAP_BYTES}s", *"i" * rank, *"q" * rank]
        for one in formats:
            layout += one
            offsets.append(struct.calcsize(layout) - struct.calcsize(one))
    return layout, offsets


def launch_source(
    kernel: str, grid: Sequence[int], arguments: Sequence[Any], warps: int, stages: int, constants: dict[str, int]
) -> None:
    """As launch, but by Triton, which compiles the source if it has not done so before."""
    file, name = kernel.split(".")
    source = getattr(import_module(f".source.{file}", __package__), name)
    source[tuple(grid)](*map(triton_argument, arguments), **constants, num_warps=warps, num_stages=stages)


def triton_argument(argument: Any) -> Any:
    """An argument of launch in the form that Triton takes: Tiles become a tensor descriptor."""
    if not isinstance(argument, Tiles):
        return argument
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(argument.tensor, list(argument.block))


def ceil_div(number: int, by: int) -> int:
    """number / by, rounded up."""
    return -(-number // by)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


"""Calls NVIDIA's driver: loads kernels, launches them, and describes tensors that the card copies in tiles.

Names and numbers are those of NVIDIA's CUDA Driver API.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_void_p
from typing import Any

import torch

from ....core.refusal import Refusal

# The name of the driver's library.
LIBRARY = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
# CUDA_ERROR_OUT_OF_MEMORY, and CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
OUT_OF_MEMORY = 2
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
# The bytes of shared memory that a block may have without MAX_DYNAMIC_SHARED_SIZE_BYTES.
USUAL_SHARED_BYTES = 48 << 10
# The size of a CUtensorMap in bytes, and the alignment of its address.
MAP_BYTES = 128
MAP_ALIGNMENT = 64
# CU_TENSOR_MAP_L2_PROMOTION_L2_128B.
L2_PROMOTION_128 = 2


class Driver:
    """The functions of NVIDIA's driver. They use the current thread's CUDA context, which torch has created.

    Every method may raise RuntimeError with the driver's reason, torch.cuda.OutOfMemoryError, and Refusal if the
    library lacks a function that it calls.

    library: the driver's library, loaded by ctypes.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._function("cuLaunchKernel").argtypes = (c_void_p, *(c_uint,) * 7, c_void_p, POINTER(c_void_p), c_void_p)

    def call(self, name: str, *arguments: Any) -> None:
        """Call the driver's function of this name. Raises for any status but success; see Driver."""
        status = self._function(name)(*arguments)
        if status:
            reason = f"{name}: {self._reason(status)}"
            raise torch.cuda.OutOfMemoryError(reason) if status == OUT_OF_MEMORY else RuntimeError(reason)

    def _function(self, name: str) -> Any:
        """The driver's function of this name. Raises Refusal if the library has none."""
        try:
            return getattr(self._library, name)
        except AttributeError:
            raise Refusal(f"NVIDIA's driver has no {name}: install the driver again") from None

    def _reason(self, status: int) -> str:
        """The driver's text for a status; the number as a string if the driver has none."""
        text = c_char_p()
        with contextlib.suppress(Refusal):
            self._function("cuGetErrorString")(status, byref(text))
        return text.value.decode("utf-8", "replace") if text.value else str(status)

    def version(self) -> tuple[int, int]:
        """The newest CUDA version that the driver supports: (12, 0) for release 525."""
        number = c_int()
        self.call("cuDriverGetVersion", byref(number))
        return number.value // 1000, number.value % 1000 // 10

    def load(self, ptx: bytes, name: str, shared: int) -> c_void_p:
        """A handle of the kernel of this name, loaded from a PTX text that ends with a zero byte. It stays loaded until
        the process ends. shared: the bytes of shared memory that a block will use."""
        module = c_void_p()
        function = c_void_p()
        self.call("cuModuleLoadData", byref(module), c_char_p(ptx))
        self.call("cuModuleGetFunction", byref(function), module, name.encode())
        if shared > USUAL_SHARED_BYTES:
            self.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
        return function

    def launch(
        self, function: c_void_p, grid: Sequence[int], threads: int, shared: int, stream: int, parameters: bytes,
        offsets: Sequence[int],
    ) -> None:
        """Launch a function of load() on a stream, without waiting for it.

        grid: the number of blocks on up to three axes. threads, shared: the threads of a block and its bytes of shared
        memory. stream: the stream's handle. parameters: the bytes of all parameters. offsets: the byte at which each
        parameter begins in them.
        """
        down, across, deep = (*grid, 1, 1)[:3]
        memory = ctypes.cast(c_char_p(parameters), c_void_p).value or 0
        # One pointer for each parameter. If they were passed as one buffer, tensor maps would be wrongly aligned.
        pointers = (c_void_p * len(offsets))(*[memory + offset for offset in offsets])
        self.call("cuLaunchKernel", function, down, across, deep, threads, 1, 1, shared, stream, pointers, None)

    def tensor_map(
        self, address: int, shape: Sequence[int], strides: Sequence[int], item_bytes: int, dtype: int, swizzle: int,
        box: Sequence[int],
    ) -> bytes:
        """The MAP_BYTES bytes of a CUtensorMap, which describes how the card copies tiles of a tensor. It is a
        parameter of a kernel. Items beyond the tensor's edges are read as zero.

        address, shape, strides: of the tensor, with strides in items; the last stride must be 1. box: the shape of a
        tile. shape, strides and box have the order of torch's dimensions. dtype, swizzle: numbers of
        CUtensorMapDataType and CUtensorMapSwizzle.
        """
        rank = len(shape)
        room = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
        start = -ctypes.addressof(room) % MAP_ALIGNMENT
        sizes = (ctypes.c_uint64 * rank)(*shape[::-1])
        pitches = [stride * item_bytes for stride in strides[-2::-1]]
        self.call(
            "cuTensorMapEncodeTiled", byref(room, start), dtype, rank, c_void_p(address), sizes,
            (ctypes.c_uint64 * (rank - 1))(*pitches), (c_uint * rank)(*box[::-1]), (c_uint * rank)(*[1] * rank), 0,
            swizzle, L2_PROMOTION_128, 0,
        )
        return room.raw[start:start + MAP_BYTES]


@functools.cache
def driver_here() -> Driver:
    """This machine's driver, loaded once. Raises Refusal if it cannot be loaded, or has no function that launches
    kernels."""
    try:
        return Driver(ctypes.CDLL(LIBRARY))
    except OSError as error:
        raise Refusal(f"NVIDIA's driver cannot be loaded ({error})") from None

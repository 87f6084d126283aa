"""Digests of weights, equal in any process for equal numbers. They identify the weights that a verdict belongs to."""
from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from .contents import PART, Contents, ContentsReader, MemorySpan, is_dense
from .exact_copy import copy_of


class WeightsDigest:
    """Computes a digest of the numbers in some parameters each time that read() is called. Keeps no parameter alive.

    Of parameters on the device that computes, and of the rare ones with gaps in their memory (contents.is_dense), all
    numbers are read. Of other parameters elsewhere (in main memory, while a GPU computes), only 1 number in
    contents.PART is read, to save time.
    """

    def __init__(
        self, parameters: Sequence[Tensor], device: torch.device, reader: ContentsReader | None = None
    ) -> None:
        """device: the one that computes. reader: see Contents. This notes the parameters' addresses: after a parameter
        has moved to other memory, a new object is needed."""
        self._near: list[MemorySpan] = []
        self._far: list[MemorySpan] = []
        self._reader = reader
        self._contents: list[Contents] = []
        for parameter in parameters:
            if is_dense(parameter):
                spans = self._near if parameter.device == device else self._far
                spans.append(MemorySpan.of(parameter))

    def read(self, label: str, parameters: Sequence[Tensor]) -> str:
        """The digest of `label`, any text, and of the parameters' shapes, strides, dtypes and present numbers, as 16
        hexadecimal digits. Waits for their devices. Leaves the parameters unchanged. The object keeps checksums of
        their numbers from the first call on, which each later call updates.

        parameters: the same ones that were given to the constructor, which does not keep them.
        """
        layouts = [(tuple(one.shape), one.stride(), str(one.dtype)) for one in parameters]
        strided = [copy_of(one, torch.contiguous_format) for one in parameters if not is_dense(one)]
        if not self._contents:
            self._contents = [Contents(self._near, 1, self._reader), Contents(self._far, PART, self._reader)]
        else:
            for contents in self._contents:
                changed = contents.begin()
                changed()
        sums = [contents.known.tolist() for contents in self._contents]
        return digest_of_values(f"{label} {layouts} {sums}", strided)


def digest_of_values(label: str, tensors: Iterable[Tensor]) -> str:
    """The digest of a label, any text, and of the numbers in these tensors, as 16 hexadecimal digits.

    The tensors may have several dtypes and devices. Dtypes count, and so does the order of tensors of the same dtype;
    shapes and devices do not. Makes one copy to the CPU for each dtype and device, and waits for it."""
    values = [tensor.detach().flatten() for tensor in tensors]
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, one in enumerate(values):
        alike.setdefault((one.dtype, one.device), []).append(index)
    for (dtype, _), indices in alike.items():
        found = [values[index] for index in indices]
        if dtype.itemsize == 1:
            # Not every version of torch can concatenate float8.
            found = [one.view(torch.uint8) for one in found]
        together = torch.cat(found).cpu()
        for index, one in zip(indices, together.split(list(map(len, found))), strict=True):
            values[index] = one
    digest = hashlib.sha256(label.encode())
    for dtype in dict.fromkeys(dtype for dtype, _ in alike):
        digest.update(f" {dtype} ".encode())
        of_type = [indices for (kind, _), indices in alike.items() if kind == dtype]
        for index in sorted(chain.from_iterable(of_type)):
            digest.update(ctypes.string_at(values[index].data_ptr(), values[index].nbytes))
    return digest.hexdigest()[:16]

"""The memory of one private pool, and what a forward asks of it: for machines without a GPU."""
from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MEBIBYTE = 2**20
LEAST_BLOCK, PAGE = 512, 2 * MEBIBYTE


class PrivatePool:
    """What one pool holds: as much as was in use at a time, in pages. The gaps that torch's allocator leaves between
    blocks are the GPU's to show."""

    def __init__(self) -> None:
        self.reserved = self.used = self.peak = 0

    def allocate(self, wanted: int) -> int:
        size = max(LEAST_BLOCK, -(-wanted // LEAST_BLOCK) * LEAST_BLOCK)
        self.used += size
        self.peak = max(self.peak, self.used)
        self.reserved = max(self.reserved, -(-self.peak // PAGE) * PAGE)
        return size

    def release(self, size: int) -> None:
        self.used -= size

    def replay(self, trace: Iterable[tuple[int, int]]) -> None:
        """These requests: (number, bytes), and (number, 0) where it is given back."""
        sizes: dict[int, int] = {}
        for number, size in trace:
            if size:
                sizes[number] = self.allocate(size)
            else:
                self.release(sizes.pop(number))


class Requests(TorchDispatchMode):
    """Takes down what is allocated inside, and when it is given back. scale: as if everything were so much larger."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and saying so to torch takes longer than noting a tensor."""
        return False

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        self.trace: list[tuple[int, int]] = []
        self._scale = scale
        self._numbers: dict[int, int] = {}
        self._views: Counter[int] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tensors((args, *(kwargs or {}).values()))}
        for tensor in tensors(outputs):
            storage = tensor.untyped_storage()._cdata
            if storage not in self._numbers and storage not in given and tensor.untyped_storage().nbytes():
                self._numbers[storage] = len(self.trace)
                self.trace.append((len(self.trace), tensor.untyped_storage().nbytes() * self._scale))
            if storage in self._numbers:
                self._views[storage] += 1
                weakref.finalize(tensor, self._gone, storage).atexit = False
        return outputs

    def _gone(self, storage: int) -> None:
        self._views[storage] -= 1
        if not self._views[storage]:
            self.trace.append((self._numbers.pop(storage), 0))


def tensors(values: Any) -> list[Tensor]:
    """Those among an operator's arguments or results, in lists as well."""
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in tensors(value)]
    return [values] if isinstance(values, Tensor) else []


def requests_of(work: Callable[[], Tensor], scale: int = 1) -> list[tuple[int, int]]:
    """The requests of a forward, of which the output stays in use."""
    with torch.no_grad(), Requests(scale) as requests:
        output = work()
        trace = list(requests.trace)
    del output
    return trace

"""Copies of a host's own parameters, bit for bit, whatever other code has put in the place of torch's functions.

OneDiff re-points parameters to other memory (channels-last, fused, pinned), and the host computes with what lies there.
A wrong image is corrected by the next one, a wrong weight stays. So these copies call torch's operators themselves
(`torch.ops.aten`): a replaced `Tensor.contiguous` or a mode of another extension changes none of them.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten


@contextmanager
def nobody_between() -> Iterator[None]:
    """No mode, no tensor subclass and no autograd takes part in the operators called inside."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
        yield


def copy_of(source: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
    """The values in memory of their own, on the same device."""
    with nobody_between():
        made: Tensor = aten.clone.default(aten.detach.default(source), memory_format=memory_format)
        return made


def copy_into(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Write the values of source over those of target, another tensor of its shape. Returns target."""
    with nobody_between():
        aten.copy_.default(target, aten.detach.default(source), non_blocking)
    return target


def rows_of(tensor: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Views of so many rows each, in order."""
    with nobody_between():
        return list(aten.split_with_sizes.default(tensor, list(counts)))

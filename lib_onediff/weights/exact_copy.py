"""Bit-exact copies of a host's parameters, also if an extension has replaced torch's functions.

OneDiff moves the host's parameters to other memory (channels-last, fused, pinned), and the host computes with the
copies. A wrong image is replaced by the next one, but a wrong weight stays. So these copies call the operators of
`torch.ops.aten`, which neither a replaced `Tensor.contiguous` nor a torch mode of an extension can change.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten


@contextmanager
def plain_operators() -> Iterator[None]:
    """A context in which operators run as torch itself defines them: without torch modes, methods of tensor subclasses,
    and autograd."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
        yield


def copy_of(source: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
    """A new detached tensor on the same device with the values of source. memory_format: by default, the copy has the
    strides of source, if source has no gaps in its memory."""
    with plain_operators():
        made: Tensor = aten.clone.default(aten.detach.default(source), memory_format=memory_format)
        return made


def copy_into(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy the values of source into the memory of target. They have the same shape, and may be on different devices.
    Returns target. non_blocking: see Tensor.copy_."""
    with plain_operators():
        aten.copy_.default(target, aten.detach.default(source), non_blocking)
    return target


def split_rows(tensor: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Views of a tensor (rows, ...): the first counts[0] rows, the next counts[1] rows, and so on. The sum of counts is
    the number of rows."""
    with plain_operators():
        return list(aten.split_with_sizes.default(tensor, list(counts)))

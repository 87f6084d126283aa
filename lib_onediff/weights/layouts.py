"""Compares the layouts of many tensors with earlier ones: their shapes, strides and dtypes.

Each replay compares those of all weights. In Python that is a third of the comparison of a network, so torch's own
comparison in C++ comes first, which torch.compile makes before each run of compiled code.
"""
from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Returns what is compared besides the strides.
shape_and_dtype = operator.attrgetter("shape", "dtype")


class Layouts:
    """The shapes, strides and dtypes of some tensors, as they are when this is made. Keeps no tensor alive.

    quick: functions of torch, quick(*tensors): True proves that the tensors have the noted layouts; False proves
        nothing, because torch also compares its modes (inference mode, autocast), and whether gradients are required.
        By whether inference mode is on; empty before the first are_same(), and if this torch has no such function.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = list(map(shape_and_dtype, tensors))
        self._strides = list(map(Tensor.stride, tensors))
        self.quick: dict[bool, Callable[..., bool]] = {}

    def are_same(self, tensors: Sequence[Any]) -> bool:
        """Whether these tensors have the noted layouts, one after the other. If so, adds a function to `quick` for the
        present mode, unless it has one."""
        with suppress(RuntimeError, TypeError):
            if list(map(Tensor.stride, tensors)) != self._strides:
                return False
            if list(map(shape_and_dtype, tensors)) != self._shapes:
                return False
            self._make_quick(tensors)
            return True
        return False

    def _make_quick(self, tensors: Sequence[Tensor]) -> None:
        """Add a function to `quick` for the present mode, unless it has one or torch cannot make one."""
        mode = torch.is_inference_mode_enabled()
        if mode not in self.quick and quick_comparison_is_right():
            with suppress(Exception):
                self.quick[mode] = quick_comparison(tensors)


def quick_comparison(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """torch's function compare(*later_tensors): True only if each tensor has the same shape, strides and dtype as the
    one at its place now. Raises an exception of any kind if this torch has no such function."""
    guards: Any = torch._C._dynamo.guards.TensorGuards
    # None: no size and no stride may differ.
    compare: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return compare


@cache
def quick_comparison_is_right() -> bool:
    """Whether quick_comparison finds every difference of layouts in this version of torch, where it has no promised
    interface: tried with tensors that differ in one property each."""
    known = torch.empty_strided((2, 3), (3, 1), dtype=torch.float32, device="cpu")
    others = [
        torch.empty_strided((2, 3), (1, 2), dtype=torch.float32, device="cpu"),
        torch.empty_strided((2, 3), (4, 1), dtype=torch.float32, device="cpu"),
        torch.empty_strided((3, 2), (3, 1), dtype=torch.float32, device="cpu"),
        torch.empty_strided((2, 2), (3, 1), dtype=torch.float32, device="cpu"),
        torch.empty_strided((2, 3, 1), (3, 1, 1), dtype=torch.float32, device="cpu"),
        torch.empty_strided((6,), (1,), dtype=torch.float32, device="cpu"),
        torch.empty_strided((2, 3), (3, 1), dtype=torch.int32, device="cpu"),
        torch.empty_strided((2, 3), (3, 1), dtype=torch.float16, device="cpu"),
    ]
    with suppress(Exception):
        compare = quick_comparison([known, known])
        same = torch.empty_like(known)
        found = [compare(*pair) for other in others for pair in ((other, known), (known, other))]
        return compare(known, same) is True and compare(same, known) is True and not any(found)
    return False

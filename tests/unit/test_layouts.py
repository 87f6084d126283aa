"""Layouts notes the shapes, strides and dtypes of weights, and finds every later change of them, also one that torch
does not count as an edit."""
from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

from lib_onediff.weights import layouts
from lib_onediff.weights.layouts import Layouts


def weights() -> list[nn.Parameter]:
    shapes = ((4, 3), (2, 3, 1, 1), (5,), ())
    return [nn.Parameter(torch.zeros(shape), requires_grad=False) for shape in shapes]


def set_data(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def changed(weight: Any) -> None:
        weight.data = change(weight.data)

    return changed


CHANGES: dict[str, Callable[[Any], object]] = {
    "transposed": set_data(lambda data: data.t()),
    "of another shape": set_data(lambda data: data.view(3, 4)),
    "with equal strides": set_data(lambda data: data[:2]),
    "of another dtype": set_data(lambda data: data.view(torch.int32)),
    "of half the width": set_data(lambda data: data.half()),
    "with one more dimension": set_data(lambda data: data[None]),
    "in place": lambda weight: weight.t_(),
    "strided in place": lambda weight: weight.as_strided_((2, 3), (3, 1)),
    "resized": lambda weight: weight.resize_(3, 3),
    "set": lambda weight: weight.set_(torch.zeros(3, 4)),
}


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_of_a_layout_is_found(
    change: Callable[[Any], object], quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """quick: whether torch has a fast comparison that Layouts trusts; that must find the change, too."""
    monkeypatch.setattr(layouts, "quick_comparison_is_right", lambda: quick)
    tensors = weights()
    noted = Layouts(tensors)
    assert noted.are_same(tensors) and len(noted.quick) == quick
    assert all(same(*tensors) for same in noted.quick.values())
    with torch.no_grad():
        change(tensors[0])
    assert not noted.are_same(tensors) and not noted.are_same(tensors[1:])
    assert not any(same(*tensors) for same in noted.quick.values())


@pytest.mark.parametrize("mode", [
    torch.no_grad, torch.inference_mode, torch.enable_grad, lambda: torch.autocast("cpu", torch.bfloat16),
])
def test_unchanged_layouts_are_the_same_in_every_mode_of_torch(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    """They are compared outside and inside the mode, with and without a weight that requires gradients."""
    tensors = weights()
    noted = Layouts(tensors)
    for _ in range(3):
        assert noted.are_same(tensors)
        with mode():
            assert noted.are_same(tensors)
            tensors[0].requires_grad_(not tensors[0].requires_grad)
        assert noted.are_same(tensors)


def test_layouts_keep_no_tensor_alive() -> None:
    tensors = weights()
    noted = Layouts(tensors)
    assert noted.are_same(tensors)
    references = list(map(weakref.ref, tensors))
    del tensors
    gc.collect()
    assert not any(reference() is not None for reference in references) and not noted.are_same([])

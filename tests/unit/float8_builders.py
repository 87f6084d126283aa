"""FP8 without a GPU and without Triton's interpreter, which rounds float8 wrongly: the operators of the native backend
by torch's, rows in float8 by torch, products by torch's own."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lib_onediff.engines import FLOAT8
from lib_onediff.model import float8 as float8_weights
from lib_onediff.model.operators import Float8Tokens, Operators, Stream
from lib_onediff.ops import torch_ops
from lib_onediff.ops.quantized import kernels as triton_float8
from lib_onediff.ops.quantized import scaled_mm as float8
from lib_onediff.ops.quantized.operators import Float8Operators
from lib_onediff.ops.triton.launch_config import Launches
from lib_onediff.ops.triton.operators import TritonOperators
from lib_onediff.ops.tuning_cache import TuningCache
from lib_onediff.runtime.runtime import runtime

NAMES = [name for name in vars(Operators) if not name.startswith("_")]


def in_float8(tokens: Tensor) -> Float8Tokens:
    return Float8Tokens(*float8.rounded_rows(tokens.flatten(0, -2)), tuple(tokens.shape[:-1]))


def layer_norm(
    stream: Stream, weight: Tensor, bias: Tensor | None, eps: float, cut: Any
) -> tuple[Stream, Float8Tokens]:
    tokens = torch_ops.materialize(stream)
    normed = torch.nn.functional.layer_norm(tokens, (tokens.shape[-1],), weight, bias, eps)
    return Stream(tokens), in_float8(normed)


def rounded_rows(rows: Tensor, values: Tensor, scales: Tensor) -> None:
    found, largest = float8.rounded_rows(rows)
    values.copy_(found)
    scales.copy_(largest.view(scales.shape))


def by_torch(name: str) -> Callable[..., Any]:
    """An operator of torch's as a method."""
    operator = getattr(torch_ops, name)
    return lambda self, *given, **named: operator(*given, **named)


def fewest_weights(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The layers with so many weights are worth it."""
    monkeypatch.setattr(float8_weights, "FEWEST_WEIGHTS", count)
    monkeypatch.setattr(runtime.operators, "_float8_looked_at", ())


def use_float8(monkeypatch: pytest.MonkeyPatch, result: torch.dtype = torch.float16) -> None:
    """The backend FLOAT8, on this machine, for networks of any size. result: the type in which products come out."""
    for name in NAMES:
        monkeypatch.setattr(TritonOperators, name, by_torch(name))
    monkeypatch.setattr(triton_float8, "layer_norm", layer_norm)
    monkeypatch.setattr(triton_float8, "geglu", lambda tokens: in_float8(torch_ops.geglu(tokens, None)))
    monkeypatch.setattr(triton_float8, "rounded_rows", rounded_rows)
    fewest_weights(monkeypatch, 0)
    # There is nothing to measure.
    monkeypatch.setattr(runtime.operators, "tune_float8", lambda layout, call: False)
    launches, always = Launches(TuningCache()), lambda *given: True
    ours = Float8Operators(launches, torch_ops.attention, lambda device, dtype: result, always)
    monkeypatch.setitem(runtime.operators._made, FLOAT8, ours)

"""Measure how a product or an attention in int8 is best cut on this GPU."""
from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...model.low_bit import INT8
from ...model.operators import QuantizedTokens
from ...model.weights import QuantizedWeight
from ..triton.launch_config import Launches, int8_attention_kernel
from ..triton.tuning import TimeMs, Trial, best_cut
from . import attention_gains, int8_attention, int8_mm
from .gains import Product


def tune_int8(
    launches: Launches, product: Product, dtype: torch.dtype, device: torch.device, time_ms: TimeMs
) -> None:
    """Choose how a product is cut, where that was not measured on this GPU. Raises what Triton raises."""
    kernel = int8_mm.kernel_for(device)
    shape_class = int8_mm.shape_class(product.rows, product.out, product.width)
    if launches.chosen(kernel, shape_class, dtype) is None:
        run = partial(int8_mm.product, *factors(product, device), None, dtype)
        launches.choose(kernel, shape_class, dtype, best_cut(Trial(kernel, shape_class, run), time_ms))


def tune_int8_attention(launches: Launches, inputs: tuple[Tensor, Tensor, Tensor], time_ms: TimeMs) -> None:
    """The same for attention in int8, with what it makes of this query, key and value first."""
    shape, dtype = inputs[0].shape, inputs[0].dtype
    kernel, shape_class = int8_attention_kernel(shape[3]), attention_gains.shape_class(shape)
    if launches.chosen(kernel, shape_class, dtype) is None:
        run = partial(int8_attention.attention, *inputs)
        launches.choose(kernel, shape_class, dtype, best_cut(Trial(kernel, shape_class, run), time_ms))


def factors(product: Product, device: torch.device) -> tuple[QuantizedTokens, QuantizedWeight]:
    """Random ones: a GPU multiplies zeros faster than others."""

    def random(rows: int) -> Tensor:
        return torch.randint(-127, 128, (rows, product.width), device=device, dtype=INT8.dtype)

    tokens = QuantizedTokens(random(product.rows), torch.ones((product.rows, 1), device=device), (product.rows,))
    return tokens, QuantizedWeight(random(product.out), torch.ones((1, product.out), device=device))

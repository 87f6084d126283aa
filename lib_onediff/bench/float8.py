"""Measure the matrix products that FP8 replaces, each in the model's dtype and in float8."""
from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from ..model.operators import Float8Tokens
from ..model.read import read_layout
from ..model.weights import Float8Weight
from ..ops.quantized.gains import Float8Choice, products
from ..ops.quantized.scaled_mm import product, rounded_rows, support
from ..ops.tuning_cache import Choices
from ..runtime.verify import relative_error
from .models import random_unet
from .options import DTYPES, name_of, sizes_for
from .variants import Unavailable

HEADINGS = ("model", "size", "product", "times a call", "us", "us in float8", "ratio", "rel. error")
CALLS = 20
REPLAYS = 15
TOGETHER = "all of them"


@dataclass
class ProductRow:
    """One matrix product. name: rows x in x out. us: of one, without what Python takes to launch it."""

    model: str
    size: str
    name: str
    count: int
    us: float
    float8_us: float
    relative_error: float | None = None

    @property
    def ratio(self) -> float:
        return self.float8_us / self.us

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}

    def cells(self) -> list[str]:
        error = "" if self.relative_error is None else f"{self.relative_error:.1e}"
        times = [f"{self.us:.1f}", f"{self.float8_us:.1f}", f"{self.ratio:.2f}"]
        return [self.model, self.size, self.name, str(self.count), *times, error]


def float8(model: str, options: argparse.Namespace, device: torch.device) -> list[ProductRow]:
    """Every product of a call at the first size that FP8 replaces, and all together. Raises Unavailable."""
    dtype, size = DTYPES[options.dtype], sizes_for(model, options.sizes)[0]
    if device.type != "cuda":
        raise Unavailable("FP8 needs an NVIDIA GPU")
    found = support(device, dtype)
    if found.result is None:
        raise Unavailable(found.reason)
    layout, choice = read_layout(random_unet(model, torch.device("meta"))), Float8Choice(Choices())
    rows = []
    for one, times in Counter(products(layout, size[1] // 8, size[0] // 8, options.batch)).items():
        if not choice.pays(one, dtype):
            continue
        count, width, out, _ = one
        tokens = torch.randn(count, width, device=device, dtype=dtype)
        weight = torch.randn(out, width, device=device, dtype=dtype) * width**-0.5
        values, scales = rounded_rows(weight)
        small, rounded = Float8Tokens(*rounded_rows(tokens), (count,)), Float8Weight(values, scales.t().contiguous())
        both = (
            lambda tokens=tokens, weight=weight: functional.linear(tokens, weight),
            lambda small=small, rounded=rounded: product(small, rounded, None, found.result),
        )
        us, float8_us = map(microseconds, both)
        error = relative_error(both[1](), both[0]())
        rows.append(ProductRow(model, name_of(size), f"{count} x {width} x {out}", times, us, float8_us, error))
    together = (sum(row.count * row.us for row in rows), sum(row.count * row.float8_us for row in rows))
    rows.append(ProductRow(model, name_of(size), TOGETHER, sum(row.count for row in rows), *together))
    return rows


def microseconds(work: Callable[[], Tensor]) -> float:
    """The median over many replays of a graph that does it several times."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            work()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) / CALLS * 1e3)
    return sorted(times)[REPLAYS // 2]

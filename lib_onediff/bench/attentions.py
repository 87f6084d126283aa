"""What self attention in INT8 gains on this machine, and how far it is off."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from ..engines.graphs.capture import CudaGraphs
from ..engines.operator_sets import OperatorSets
from ..model.read import read_layout
from ..ops.attention_tuning import Shape, random_inputs, relative_error
from ..ops.quantized.attention_gains import AttentionPlan, shape_class
from ..ops.quantized.gains import TimeMs
from ..ops.triton.launch_config import Launches, int8_attention_kernel
from ..ops.tuning_cache import TuningCache
from . import models
from .report import number

PIXELS_OF_LATENT = 8
HEADINGS = (
    "model", "batch, heads, tokens, width", "a step", "exact by", "exact ms", "int8 ms", "int8 gains", "used",
    "exact error", "int8 error", "cut",
)


@dataclass
class AttentionRow:
    """One self attention, as often as a step has it. by: the exact implementation that was measured to be the fastest.
    ms: of both, int8's with what it makes of its inputs first. errors: of the output, relative to float32, at random
    inputs."""

    model: str
    shape: Shape
    count: int
    by: str
    ms: tuple[float, float]
    used: bool
    errors: tuple[float, float]
    cut: str

    def cells(self) -> list[str]:
        exact, rounded = self.ms
        return [
            self.model, ", ".join(map(str, self.shape)), str(self.count), self.by, number(exact, ".3f"),
            number(rounded, ".3f"), number(exact / rounded, ".2f"), "yes" if self.used else "no",
            *(number(error, ".1e") for error in self.errors), self.cut,
        ]


class AttentionTable:
    """Measures every self attention of a model that may be in INT8."""

    def __init__(self, dtype: torch.dtype, device: torch.device, time_ms: TimeMs | None = None) -> None:
        """time_ms: how long work takes, None: in a graph."""
        tuning_cache = TuningCache()
        self._dtype, self._device = dtype, device
        self._operators, self._launches = OperatorSets(tuning_cache), Launches(tuning_cache)
        self._time_ms = time_ms or partial(CudaGraphs().time_ms, device, dtype)

    def rows(self, model: str, size: tuple[int, int], batch: int) -> Iterator[AttentionRow]:
        """Those of one model's step, in the order of their first use. size: width and height in pixels."""
        layout = read_layout(models.random_unet(model, torch.device("meta")))
        width, height = (pixels // PIXELS_OF_LATENT for pixels in size)
        for shape, count in Counter(AttentionPlan().shapes(layout, height, width, batch).values()).items():
            yield self.row(model, shape, count)

    def row(self, model: str, shape: Shape, count: int = 1) -> AttentionRow:
        """One attention. Raises RuntimeError where it cannot be measured."""
        from ..ops.quantized.int8_attention import Int8Attention

        dtype, device = self._dtype, self._device
        exact, low_bit = self._operators.attention, self._operators.low_bit
        low_bit.measure_attention(shape, dtype, device, self._time_ms)
        times = low_bit.attention.measured(shape, dtype)
        assert times is not None
        query, key, value = inputs = random_inputs(shape, shape, dtype, device)
        rounded = Int8Attention(exact, lambda *given: True, self._launches)
        wide = exact(query.float(), key.float(), value.float())
        errors = relative_error(exact(*inputs), wide), relative_error(rounded(*inputs), wide)
        cut = self._launches.of(int8_attention_kernel(shape[3]), shape_class(shape), dtype)
        by, used = exact.pick(shape, shape, dtype), low_bit.attention.serves(shape, dtype)
        return AttentionRow(model, shape, count, by, times, used, errors, " ".join(map(str, cut)))


def sums(rows: list[AttentionRow]) -> str:
    """What all these attentions of a model's step take, in one line."""
    exact, rounded = (sum(row.count * row.ms[index] for row in rows) for index in (0, 1))
    return f"{rows[0].model}, all self attentions of a step: exact {exact:.2f} ms, int8 {rounded:.2f} ms"

"""What products in eight bits gain on this machine, as tables to be pasted into an issue."""
from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from ..engines import NATIVE
from ..engines.graphs.capture import CudaGraphs
from ..engines.operator_sets import OperatorSets
from ..model.low_bit import FP8, INT8, KERNEL, KINDS_OF, NORMED, PADDING, Kind
from ..model.operators import Stream
from ..model.read import read_layout
from ..model.weights import Affine
from ..ops.quantized.gains import Product, products
from ..ops.quantized.ways import EPS
from ..ops.triton.launch_config import CONVOLUTION, Launches
from ..ops.tuning_cache import TuningCache
from . import models
from .measure import Plan, Row, measure
from .options import DTYPES
from .report import number

# Of pixels, and latents of one image with guidance.
SHAPES = {"sdxl": (1024, 1024), "sd15": (512, 512)}
BATCH, TOKENS, PIXELS_OF_LATENT = 2, 77, 8
HEADINGS = (
    "model", "rows x in x out", "from", "a step", "library us", "fp8 us", "int8 us", "int8 gains", "cut",
    "in place: library", "fp8", "int8",
)
VARIANTS = (
    "onediff native", *(f"onediff native {option}" for option in KINDS_OF), "onediff native fp8, within the budget",
)


@dataclass
class ProductRow:
    """One product, as often as a step has it. Microseconds of the product alone, and in_place with what makes its
    tokens and the norm after it: the library's in the model's type, float8's and int8's. None: this machine has none.
    """

    model: str
    product: Product
    count: int
    alone: tuple[float, float | None, float | None]
    in_place: tuple[float, float | None, float | None]
    cut: str

    def cells(self) -> list[str]:
        library, fp8, int8 = self.alone
        gain = None if int8 is None else library / int8
        shape = "x".join(map(str, self.product[:3]))
        return [
            self.model, shape, self.product.source, str(self.count), number(library, ".1f"), number(fp8, ".1f"),
            number(int8, ".1f"), number(gain, ".2f"), self.cut, *(number(value, ".1f") for value in self.in_place),
        ]


class ProductTable:
    """Measures every product of a model."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        tuning_cache = TuningCache()
        self._dtype, self._device = dtype, device
        self._operators, self._launches = OperatorSets(tuning_cache), Launches(tuning_cache)
        low_bit = self._operators.low_bit
        self._time_ms = partial(CudaGraphs().time_ms, device, dtype)
        self.lacks = {kind: low_bit.why_not(kind.name, device, dtype) for kind in (FP8, INT8)}

    def rows(self, model: str) -> Iterator[ProductRow]:
        """Those of one model's step, in the order of their first use."""
        layout = read_layout(models.random_unet(model, torch.device("meta")))
        width, height = (pixels // PIXELS_OF_LATENT for pixels in SHAPES[model])
        from ..ops.quantized.int8_mm import copies_tiles

        convolves = self.lacks[FP8] is None and copies_tiles(self._device)
        every = (product for _, product in products(layout, height, width, BATCH, convolutions=convolves))
        for product, count in Counter(every).items():
            yield self._row(model, product, count) if product.size is None else self._convolution(model, product, count)

    def _row(self, model: str, product: Product, count: int) -> ProductRow:
        from ..ops.quantized import int8_mm
        from ..ops.quantized.tuning import factors

        dtype, device = self._dtype, self._device
        tokens, weight, bias = (
            torch.randn(shape, device=device, dtype=dtype)
            for shape in ((product.rows, product.width), (product.out, product.width), (product.out,))
        )
        library = self._microseconds(lambda: functional.linear(tokens, weight, bias))
        affine = Affine(weight, bias)
        in_place = {kind: self._in_place(product, kind) for kind in (FP8, INT8)}
        plain = next((both[0] for both in in_place.values() if both), library)
        fp8, int8, cut = None, None, ""
        if self.lacks[FP8] is None:
            fp8 = self._fp8_microseconds(product, tokens, affine)
        if self.lacks[INT8] is None:
            kernel = int8_mm.kernel_for(device)
            shape_class = int8_mm.shape_class(product.rows, product.out, product.width)
            config = self._launches.of(kernel, shape_class, dtype)
            pair = factors(product, device)
            int8 = self._microseconds(lambda: int8_mm.product(*pair, bias, dtype, config))
            cut = " ".join(map(str, config))
        placed = {kind: None if both is None else both[1] for kind, both in in_place.items()}
        return ProductRow(model, product, count, (library, fp8, int8), (plain, placed[FP8], placed[INT8]), cut)

    def _convolution(self, model: str, product: Product, count: int) -> ProductRow:
        """A convolution and the group norm before it; there is none in int8."""
        from ..ops.quantized import convolution, kernels
        from ..ops.quantized.tuning import image_of

        assert product.size is not None
        placed = self._in_place(product, FP8)
        image = image_of(product, self._device)
        weight = torch.randn((product.out, product.width), device=self._device, dtype=self._dtype)
        rounded, channels = kernels.rounded_weight(weight, FP8), image.values.shape[3]
        shape_class = convolution.shape_class(image, product.out)
        config = self._launches.of(CONVOLUTION, shape_class, self._dtype)
        fp8 = self._microseconds(lambda: convolution.convolution(image, rounded, self._dtype, config))
        exact, matrix = image.values.to(self._dtype).permute(0, 3, 1, 2), weight.view(-1, KERNEL, KERNEL, channels)
        library = self._microseconds(
            lambda: functional.conv2d(exact, matrix.permute(0, 3, 1, 2), padding=PADDING)
        )
        plain, ours = placed or (library, None)
        cut = " ".join(map(str, config))
        return ProductRow(model, product, count, (library, fp8, None), (plain, ours, None), cut)

    def _fp8_microseconds(self, product: Product, tokens: Tensor, affine: Affine) -> float:
        """Of the product alone, as the operators do it: the next norm scales and adds what is added to tokens."""
        from ..ops.quantized import kernels

        operators = self._operators.of(NATIVE)
        affine = affine._replace(low_bit=(kernels.rounded_weight(affine.weight, FP8),))
        if product.source == NORMED:
            ones = torch.ones(product.width, device=tokens.device, dtype=tokens.dtype)
            _, normed = kernels.layer_norm(Stream(tokens), ones, None, EPS, FP8)
            return self._microseconds(lambda: operators.linear(normed, affine))
        stream, rows = Stream(tokens.new_zeros(product.rows, product.out)), kernels.rounded(tokens, FP8)
        return self._microseconds(lambda: operators.add_linear(stream, rows, affine))

    def _microseconds(self, work: Callable[[], object]) -> float:
        return self._time_ms(work) * 1e3

    def _in_place(self, product: Product, kind: Kind) -> tuple[float, float] | None:
        if self.lacks[kind] is not None:
            return None
        low_bit = self._operators.low_bit
        low_bit.measure(product, self._dtype, self._device, kind, self._time_ms)
        times = low_bit.choice.measured(product, self._dtype, kind)
        return None if times is None else (times[0] * 1e3, times[1] * 1e3)


def sums(rows: list[ProductRow]) -> str:
    """What all products of a model's step take, in one line; without convolutions."""
    linear, parts = [row for row in rows if row.product.size is None], []
    for name, index in (("library", 0), ("fp8", 1), ("int8", 2)):
        times = [row.alone[index] for row in linear]
        if None not in times:
            total = sum(row.count * float(row.alone[index] or 0) for row in linear) / 1e3
            parts.append(f"{name} {total:.2f} ms")
    return f"{rows[0].model}, all of these products of a step: {', '.join(parts)}"


def why_not(device: torch.device, dtype: torch.dtype, operators: OperatorSets) -> str | None:
    """Why nothing can be measured here."""
    lack = operators.why_not_native(device)
    return lack or operators.low_bit.why_not("auto", device, dtype)


def step(options: argparse.Namespace, device: torch.device) -> list[Row]:
    """SDXL's step, exact and in eight bits."""
    unet: nn.Module = models.random_unet("sdxl", device)
    plan = Plan("sdxl", [SHAPES["sdxl"]], VARIANTS, BATCH, TOKENS, DTYPES[options.dtype], options.runs)
    return measure(unet, plan)

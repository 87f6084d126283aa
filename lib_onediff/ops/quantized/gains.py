"""Which matrix products are done in float8: those that gain by it, measured once on a machine."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...model.float8 import float8_layers, width_of
from ...model.forward import transformer_blocks
from ...model.layout import LayerNorm, UNetLayout
from ...model.operators import Operators, Stream
from ...model.weights import Affine, Float8Weight
from ..tuning_cache import TuningCache
from .scaled_mm import rounded_rows

# Rows times in times out. On an H200 a product that is smaller, or comes after a GEGLU, gains less than it costs.
WORTHWHILE = 8_000_000_000
# What is lossy must be clearly faster.
WORTH_ROUNDING = 0.9
# To look whether the weights are still those that were rounded takes a tenth of a millisecond a call.
WORTH_LOOKING_MS = 0.15
TimeMs = Callable[[Callable[[], object]], float]


class Product(NamedTuple):
    """rows x width tokens times a weight of width x out. gated: the tokens come from a GEGLU and are added to others
    afterwards; else from a layer norm."""

    rows: int
    width: int
    out: int
    gated: bool

    @classmethod
    def of(cls, tokens: Tensor, weight: Tensor, gated: bool) -> Product:
        """tokens: those that the GEGLU or the norm takes. weight: (out, in)."""
        return cls(tokens.numel() // tokens.shape[-1], weight.shape[1], weight.shape[0], gated)


def products(layout: UNetLayout, height: int, width: int, batch: int) -> Iterator[Product]:
    """Every matrix product of a call that may be done in float8, as often as it is done. height, width: of the latent.
    """
    worthwhile = set(float8_layers(layout))
    for block, pixels in transformer_blocks(layout, height, width):
        for layer in (block.self_attention.query_key_value, block.feed_forward_in, block.feed_forward_out):
            if layer in worthwhile:
                yield Product(batch * pixels, width_of(layer), layer.out_features, layer is block.feed_forward_out)


class Float8Choice:
    """Safe on any thread."""

    def __init__(self, tuning_cache: TuningCache) -> None:
        self._tuning_cache = tuning_cache
        self._known: dict[tuple[Product, torch.dtype], bool] = {}

    def pays(self, product: Product, dtype: torch.dtype) -> bool:
        """Whether a product is done in float8: as was measured; until then, as on an H200."""
        known = self._known.get((product, dtype))
        if known is None:
            gains = self.gains(product, dtype)
            large = product.rows * product.width * product.out >= WORTHWHILE
            known = large and not product.gated if gains is None else gains > 0
            self._known[product, dtype] = known
        return known

    def gains(self, product: Product, dtype: torch.dtype) -> float | None:
        """The milliseconds that were measured to be gained, 0 where they are too few; None where nothing was."""
        value = self._tuning_cache.get(choice_name(product, dtype))
        if not (isinstance(value, list) and len(value) == 2 and all(isinstance(ms, (int, float)) for ms in value)):
            return None
        plain, float8 = value
        return plain - float8 if float8 < WORTH_ROUNDING * plain else 0.0

    def why_none(self, wanted: Mapping[Product, int], dtype: torch.dtype) -> str | None:
        """Why a call with so many of each product gains nothing, in one sentence; None where it does, or may."""
        if not wanted:
            return "this UNet's matrix products are too small to gain by FP8"
        gains = [(self.gains(product, dtype), count) for product, count in wanted.items()]
        measured = [ms * count for ms, count in gains if ms is not None]
        if len(measured) < len(gains) or sum(measured) > WORTH_LOOKING_MS:
            return None
        return "at this size the matrix products gain nothing by FP8 on this machine (measured)"

    def measure(
        self, product: Product, dtype: torch.dtype, plain: Callable[[], object], float8: Callable[[], object],
        time_ms: TimeMs,
    ) -> None:
        """Measure both ways; the plain one is chosen unless the other is clearly faster."""
        self._tuning_cache.set(choice_name(product, dtype), [time_ms(plain), time_ms(float8)])
        self._known.pop((product, dtype), None)

    def forget(self) -> None:
        """Ask for every choice again."""
        self._known = {}


def choice_name(product: Product, dtype: torch.dtype) -> str:
    kind = "gated" if product.gated else "normed"
    shape = "x".join(map(str, product[:3]))
    return f"float8 product, {kind}, {shape}, {str(dtype).removeprefix('torch.')}"


EPS = 1e-5


def both_ways(
    product: Product, dtype: torch.dtype, device: torch.device, native: Operators, always: Operators
) -> tuple[Callable[[], object], Callable[[], object]]:
    """A product by the native operators, and by those that do it in float8, with what makes its tokens and the norm
    after it.
    """
    from .kernels import layer_norm  # without Triton there are none, and this module is imported all the same

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    weight = random(product.out, product.width)
    values, scales = rounded_rows(weight)
    affine = Affine(weight, None, Float8Weight(values, scales.t().contiguous()))
    if product.gated:
        hidden, stream = random(product.rows, 2 * product.width), Stream(random(product.rows, product.out))
        vector = random(product.out)

        def gated(ops: Operators) -> object:
            added = ops.add_linear(stream, ops.geglu(hidden, affine), affine)
            return layer_norm(added, vector, None, EPS)

        return lambda: gated(native), lambda: gated(always)
    tokens, parameters = random(product.rows, product.width), Affine(random(product.width), None)
    norm = LayerNorm("norm", product.width, EPS)

    def normed(ops: Operators) -> object:
        return ops.linear(ops.layer_norm(Stream(tokens), parameters, norm, affine)[1], affine)

    return lambda: normed(native), lambda: normed(always)

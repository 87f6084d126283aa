"""Which matrix products are done in eight bits, and in which kind: as was measured, once on a kind of card."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ....core.card import current_card, named
from ....core.device import TimeMs
from ....core.tuning_cache import TuningCache
from ....weights.low_bit import FP8, GROUP_NORMED, INT8, KINDS, NORMED, Kind, sized_low_bit_layers

# Rows times in times out. On an H200 a product that is smaller, or comes after a GEGLU, gains less than it costs.
WORTHWHILE = 8_000_000_000
# What is lossy must be clearly faster.
WORTH_ROUNDING = 0.9
# To look whether the weights are still those that were rounded takes a tenth of a millisecond a call.
WORTH_LOOKING_MS = 0.15
# Of an image whose convolutions may be in eight bits. The norm of a smaller one is another kernel, and gains less.
FEWEST_PIXELS = 32 * 32


class Product(NamedTuple):
    """rows x width tokens times a weight of width x out. source: what makes the tokens (weights.low_bit); what comes
    from a norm is written as it is, and the other products are added to tokens afterwards. size: (height, width) of the
    images whose pixels the rows are, of a convolution."""

    rows: int
    width: int
    out: int
    source: str
    size: tuple[int, int] | None = None


def products(
    layout: Any, height: int, width: int, batch: int, fewest_weights: int | None, convolutions: bool
) -> Iterator[tuple[str, Product]]:
    """The name of every layer that may be done in eight bits, and its product in a call. layout: of a UNet. height,
    width: of the latent. fewest_weights: see low_bit_layers. convolutions: whether they may.
    """
    for layer, size in sized_low_bit_layers(layout, height, width, fewest_weights):
        pixels, is_convolution = size[0] * size[1], layer.source == GROUP_NORMED
        if not is_convolution:
            yield layer.name, Product(batch * pixels, layer.width, layer.rows, layer.source)
        elif convolutions and pixels >= FEWEST_PIXELS:
            yield layer.name, Product(batch * pixels, layer.width, layer.rows, layer.source, size)


def suited(product: Product, kinds: Sequence[Kind]) -> list[Kind]:
    """Those of these kinds in which there is such a product."""
    return [kind for kind in kinds if product.size is None or kind is FP8]


class ProductChoice:
    """Safe on any thread. changes: how often what is chosen may have changed. everywhere: choose eight bits for every
    layer of any size, whatever it gains; what that does to images is then seen on a model too small to gain."""

    everywhere = False

    def __init__(self, tuning_cache: TuningCache) -> None:
        self._tuning_cache = tuning_cache
        self._known: dict[tuple[Product, torch.dtype, tuple[torch.dtype, ...], int], Kind | None] = {}
        self.changes = 0

    def best(self, product: Product, dtype: torch.dtype, kinds: Sequence[torch.dtype]) -> Kind | None:
        """In which of these kinds a product is done, None for none: as was measured; until then, as on an H200.

        kinds: their types.
        """
        key = product, dtype, tuple(kinds), current_card()
        if key not in self._known:
            self._known[key] = self._best(product, dtype, [kind for kind in KINDS if kind.dtype in kinds])
        return self._known[key]

    def _best(self, product: Product, dtype: torch.dtype, kinds: Sequence[Kind]) -> Kind | None:
        if self.everywhere and kinds:
            return kinds[0]
        gains = {kind: self.gains(product, dtype, kind) for kind in kinds}
        measured = {kind: gain for kind, gain in gains.items() if gain is not None}
        if not measured:
            return unmeasured(product, kinds)
        best = max(measured, key=measured.__getitem__)
        if best is INT8 and measured.get(FP8, 0) > 0 and not self._is_clearly_faster(product, dtype):
            best = FP8
        return best if measured[best] > 0 else None

    def _is_clearly_faster(self, product: Product, dtype: torch.dtype) -> bool:
        """INT8 than FP8. What is measured are short bursts; at a card's power limit, an H100's clock fell by a tenth
        under INT8, and did not under FP8 (.readme/low-bit.md)."""
        int8, fp8 = (self.measured(product, dtype, kind) for kind in (INT8, FP8))
        return int8 is not None and (fp8 is None or int8[1] < WORTH_ROUNDING * fp8[1])

    def shortest(self, product: Product, dtype: torch.dtype, kinds: Sequence[Kind]) -> Kind:
        """The kind in which a product takes the least time, whatever it gains; where not all was measured, the nearest
        to the model's type."""
        times = [self.measured(product, dtype, kind) for kind in kinds]
        rounded = [one[1] for one in times if one is not None]
        return kinds[-1] if len(rounded) < len(kinds) else kinds[rounded.index(min(rounded))]

    def gains(self, product: Product, dtype: torch.dtype, kind: Kind) -> float | None:
        """The milliseconds that were measured to be gained, 0 where they are too few; None where nothing was."""
        times = self.measured(product, dtype, kind)
        if times is None:
            return None
        plain, rounded = times
        return plain - rounded if rounded < WORTH_ROUNDING * plain else 0.0

    def measured(self, product: Product, dtype: torch.dtype, kind: Kind) -> tuple[float, float] | None:
        """Milliseconds of a product as the model's type has it, and in eight bits; None where nothing was measured."""
        value = self._tuning_cache.get(choice_name(product, dtype, kind))
        if not (isinstance(value, list) and len(value) == 2 and all(isinstance(ms, (int, float)) for ms in value)):
            return None
        return value[0], value[1]

    def measure(
        self, product: Product, dtype: torch.dtype, kind: Kind, plain: Callable[[], object],
        rounded: Callable[[], object], time_ms: TimeMs,
    ) -> None:
        """Measure both ways; the plain one is chosen unless the other is clearly faster."""
        self._tuning_cache.set(choice_name(product, dtype, kind), [time_ms(plain), time_ms(rounded)])
        self.forget()

    def why_none(self, wanted: Mapping[Product, int], dtype: torch.dtype, kinds: Sequence[Kind]) -> str | None:
        """Why a call with so many of each product gains nothing, in one sentence; None where it does, or may."""
        if self.everywhere:
            return None
        names = " or ".join(kind.name.upper() for kind in kinds)
        if not wanted:
            return f"this UNet's matrix products are too small to gain by {names}"
        total = 0.0
        for product, count in wanted.items():
            gains = [self.gains(product, dtype, kind) for kind in suited(product, kinds)]
            known = [gain for gain in gains if gain is not None]
            if len(known) < len(gains):
                return None
            total += max(known, default=0.0) * count
        if total > WORTH_LOOKING_MS:
            return None
        return f"at this size the matrix products gain nothing by {names} on this machine (measured)"

    @contextlib.contextmanager
    def used_everywhere(self) -> Iterator[None]:
        """Inside, see everywhere."""
        self.everywhere = True
        self.forget()
        try:
            yield
        finally:
            self.everywhere = False
            self.forget()

    def forget(self) -> None:
        """Ask for every choice again."""
        self._known = {}
        self.changes += 1


def unmeasured(product: Product, kinds: Sequence[Kind]) -> Kind | None:
    """In which of these kinds, the preferred one first, a product is done of which nothing was measured; None: in
    none."""
    large = product.rows * product.width * product.out >= WORTHWHILE
    return kinds[0] if kinds and large and product.source == NORMED else None


def choice_name(product: Product, dtype: torch.dtype, kind: Kind) -> str:
    shape = "x".join(map(str, (*product[:3], *(product.size or ()))))
    return named(f"{kind.name} product, {product.source}, {shape}, {str(dtype).removeprefix('torch.')}")

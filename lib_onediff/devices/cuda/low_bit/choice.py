"""Products in eight bits on this machine: which kinds there are, which pay, and how they are launched."""
from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from ....core.call import Call
from ....core.card import current_card
from ....core.device import TimeMs
from ....core.key import Lossy
from ....core.operators import Operators
from ....core.tuning_cache import TuningCache
from ....weights.low_bit import FP8, GATED, INT8, KINDS_OF, NORMED, Kind, Round, WantedKinds, every_low_bit_layer
from ...torch import operators as torch_ops
from ..kernels.launch_config import Launches
from .float8 import float8_support, why_not
from .gains import Product, ProductChoice, products, suited

log = logging.getLogger("onediff")
Answer = TypeVar("Answer")


class LastAnswer:
    """What was asked last, and its answer."""

    def __init__(self) -> None:
        self._question: object = None
        self._answer: Any = None

    def to(self, question: object, find: Callable[[], Answer]) -> Answer:
        if question != self._question:
            self._question, self._answer = question, find()
        answer: Answer = self._answer
        return answer


class LowBit:
    """What products in eight bits need besides exact kernels. Sizes are those of the call that is asked about."""

    def __init__(self, tuning_cache: TuningCache, launches: Launches) -> None:
        self.tuning_cache = tuning_cache
        self.choice = ProductChoice(tuning_cache)
        self._launches = launches
        self._products, self._wanted, self._classes = LastAnswer(), LastAnswer(), LastAnswer()
        self._float8_support = functools.cache(float8_support)
        # What could not be timed: tried once in a process, and decided as on an H200.
        self._not_timed: set[tuple[Product, torch.dtype, Kind, int]] = set()

    def why_not(self, option: str, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why a device has no products as the option wants them for a model of this dtype, in one sentence; None if it
        has."""
        wanted = KINDS_OF[option]
        # Of all kinds, int8 asks for the least.
        return None if self.kinds(wanted, device, dtype) else self._lack(wanted[-1], device, dtype)

    def kinds(self, wanted: Collection[Kind], device: torch.device, dtype: torch.dtype) -> tuple[Kind, ...]:
        """Those of these kinds that a device has."""
        return tuple(kind for kind in wanted if self._lack(kind, device, dtype) is None)

    def _lack(self, kind: Kind, device: torch.device, dtype: torch.dtype) -> str | None:
        return why_not(kind, device, dtype) if kind is INT8 else self._float8_support(device, dtype).reason

    # None where there are no products in float8: then nobody asks.
    def _float8_result(self, device: torch.device, dtype: torch.dtype) -> Any:
        return self._float8_support(device, dtype).result

    def quantizer(self) -> Round:
        """By what weights are rounded."""
        from .kernels import rounded_rows

        return rounded_rows

    def operators(self, attention: Callable[[Tensor, Tensor, Tensor, bool], Tensor]) -> Operators:
        """Our own. The weights that are there in eight bits tell what is done in them."""
        return self._operators(attention, self.choice.best)

    def _operators(self, attention: Callable[[Tensor, Tensor, Tensor, bool], Tensor], choose: Any) -> Operators:
        from .operators import LowBitOperators

        return LowBitOperators(self._launches, attention, self._float8_result, choose)

    def classes(self, layout: Any) -> Mapping[str, str]:
        """The class of every layer that can be in eight bits, by its name."""
        return self._classes.to(layout, lambda: {one.name: one.layer_class for one in every_low_bit_layer(layout)})

    def wanted(self, lossy: Lossy, layout: Any, call: Call) -> WantedKinds:
        """The kind in which each layer's weight is wanted; layers that are better off as they are have none. With
        lossy.only, no layer is, nor are the keys and values of the cross attention, which are multiplied in the model's
        type."""
        dtype, kinds, every = call.latent.dtype, self._kinds_for(lossy, call), self._products_of(lossy, layout, call)

        def find() -> WantedKinds:
            found: dict[str, Kind] = {}
            for name, product in every.items():
                best = self.choice.best(product, dtype, [kind.dtype for kind in suited(product, kinds)])
                if best is None and lossy.only:
                    best = self.choice.shortest(product, dtype, kinds)
                if best is not None:
                    found[name] = best
            if lossy.only:
                found |= {attention.key_value.name: kinds[-1] for attention in layout.cross_attentions}
            return found

        question = every, layout, dtype, kinds, lossy.only, self.choice.changes, current_card()
        return self._wanted.to(question, find)

    def _kinds_for(self, lossy: Lossy, call: Call) -> tuple[Kind, ...]:
        return self.kinds(KINDS_OF[lossy.low_bit], call.latent.device, call.latent.dtype)

    def _products_of(self, lossy: Lossy, layout: Any, call: Call) -> Mapping[str, Product]:
        """By the names of the layers that may be in eight bits."""
        batch, _, height, width = call.latent.shape
        fewest = 0 if self.choice.everywhere else None
        question = layout, height, width, batch, fewest, self._convolves(lossy, call)
        return self._products.to(question, lambda: dict(products(*question)))

    def _convolves(self, lossy: Lossy, call: Call) -> bool:
        """Whether convolutions may be in eight bits. What takes the place of the host's weights is linear layers'."""
        device = call.latent.device
        if device.type != "cuda" or lossy.only or FP8 not in self._kinds_for(lossy, call):
            return False
        # Without Triton, this cannot be imported.
        from .products import copies_tiles

        return copies_tiles(device)

    def why_none_here(self, lossy: Lossy, layout: Any, call: Call) -> str | None:
        """Why this call gains nothing by products in eight bits, in one sentence; None where it does, or may."""
        counted = Counter(self._products_of(lossy, layout, call).values())
        if counted and lossy.only:
            # It is memory that is gained.
            return None
        return self.choice.why_none(counted, call.latent.dtype, self._kinds_for(lossy, call))

    def tune(self, lossy: Lossy, layout: Any, call: Call, time_ms: TimeMs) -> bool:
        """Measure which of this call's products gain by eight bits, where that is not known; whether it was so.
        time_ms: how long work takes in a graph. Raises torch.cuda.OutOfMemoryError.
        """
        dtype, device, measured = call.latent.dtype, call.latent.device, False
        if self.choice.everywhere:
            return False
        for kind in self._kinds_for(lossy, call):
            for product in set(self._products_of(lossy, layout, call).values()):
                untimed = product, dtype, kind, current_card()
                known = untimed in self._not_timed or self.choice.gains(product, dtype, kind) is not None
                if known or kind not in suited(product, [kind]):
                    continue
                measured = True
                try:
                    self.measure(product, dtype, device, kind, time_ms)
                except torch.cuda.OutOfMemoryError:
                    raise
                except RuntimeError:
                    # The call can be served all the same.
                    self._not_timed.add(untimed)
                    log.warning("OneDiff: %s in %s cannot be timed", product, kind.name, exc_info=True)
        return measured

    def measure(
        self, product: Product, dtype: torch.dtype, device: torch.device, kind: Kind, time_ms: TimeMs
    ) -> None:
        """Measure what a product gains by a kind."""
        from .tuning import tune_product, way_of

        tune_product(self._launches, product, dtype, device, kind, self._float8_result(device, dtype), time_ms)
        way = way_of(product, dtype, device, kind)

        def chosen(one: Product, *given: Any) -> Kind | None:
            # What makes the tokens of a GEGLU's reader is in eight bits both ways.
            return kind if product.source == GATED and one.source == NORMED else None

        plain, rounded = (
            functools.partial(way, self._operators(torch_ops.attention, choose))
            for choose in (chosen, lambda *given: kind)
        )
        self.choice.measure(product, dtype, kind, plain, rounded, time_ms)

    def forget(self) -> None:
        """Trust no choice that was made before."""
        self.choice.forget()
        self._products, self._not_timed = LastAnswer(), set()

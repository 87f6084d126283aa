"""Products in eight bits on this machine: the kinds (FP8, INT8) that it has, and the products that gain by them, as was
measured once on each model of card."""
from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ....core.call import Call
from ....core.card import TuningCache, current_card, named
from ....core.device import TimeMs
from ....core.key import Lossy
from ....core.leaves import GATED, NORMED
from ....core.operators import Operators
from ....weights.low_bit import (
    INT8,
    KINDS,
    KINDS_OF,
    Kind,
    Product,
    Round,
    WantedKinds,
    every_low_bit_layer,
    low_bit_products,
    prompt_layers,
)
from ...torch import operators as torch_ops
from ..kernels import rounding
from ..kernels.launch_config import Launches, random_on, tuned
from ..kernels.operators import NativeOperators
from ..tuning import trial_of, way_of
from .float8 import float8_support, why_not

log = logging.getLogger("onediff")
Answer = TypeVar("Answer")
# A lossy product must be clearly faster than an exact one, and INT8 than FP8: only short bursts are measured, and at
# its power limit an H100's clock fell by a tenth under INT8, but not under FP8 (.readme/speed-and-quality.md).
WORTH_ROUNDING = 0.9
# The check that the weights have not changed since they were rounded takes a tenth of a millisecond a call.
WORTH_LOOKING_MS = 0.15
# The memory of a forward beside weights, in outputs of its widest product: SDXL's graph at 1024x1024 takes 348 MiB,
# which is 4.1 outputs, and a call without a graph some more.
WIDEST_OUTPUTS = 5


class LowBit:
    """Chooses the layers of a call that are computed in eight bits, by what was measured at the call's sizes.

    everywhere: choose eight bits for every layer of any size, whatever it gains. So tests see the effect on images with
    models that are too small to gain."""

    everywhere = False

    def __init__(self, tuning_cache: TuningCache, launches: Launches) -> None:
        self.tuning_cache = tuning_cache
        self._launches = launches
        self._float8_support = functools.cache(float8_support)
        self._known = functools.cache(lambda card, *question: self._best(*question))
        # The last question of each sort, and its answer: see _once.
        self._answers: dict[str, tuple[object, Any]] = {}
        # Products that could not be timed. They are tried once in a process, and computed in the model's type.
        self._not_timed: set[tuple[Product, torch.dtype, Kind, int]] = set()
        # The number of changes of the measurements that choices depend on.
        self._changes = 0

    # --- what the machine has -------------------------------------------------------------------------------------

    def why_not(self, option: str, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why a device has no products as the option wants them for a model of this dtype, in one sentence; None if it
        has."""
        wanted = KINDS_OF[option]
        # Of all kinds, int8 asks for the least.
        return None if self.kinds(wanted, device, dtype) else self._lack(wanted[-1], device, dtype)

    def kinds(self, wanted: Sequence[Kind], device: torch.device, dtype: torch.dtype) -> tuple[Kind, ...]:
        """Those of these kinds that a device computes for a model of this dtype."""
        return tuple(kind for kind in wanted if self._lack(kind, device, dtype) is None)

    def _lack(self, kind: Kind, device: torch.device, dtype: torch.dtype) -> str | None:
        return why_not(kind, device, dtype) if kind is INT8 else self._float8_support(device, dtype).reason

    def quantizer(self) -> Round:
        """The function that rounds weights."""
        return rounding.rounded_rows

    def operators(
        self, attention: Callable[[Tensor, Tensor, Tensor, bool], Tensor], choose: Any = None
    ) -> Operators:
        """Our own operators. They compute in eight bits with layers that have such weights. choose: instead of best."""
        # It is not called where there are no products in float8.
        result: Any = lambda device, dtype: self._float8_support(device, dtype).result  # noqa: E731
        return NativeOperators(self._launches, attention, result, choose or self.best)

    # --- what a call wants ----------------------------------------------------------------------------------------

    def classes(self, layout: Any) -> Mapping[str, str]:
        """The class of every layer that can be in eight bits, by its name."""
        return self._once("classes", layout, lambda: {one.name: one.layer_class for one in every_low_bit_layer(layout)})

    def wanted(self, lossy: Lossy, layout: Any, call: Call) -> WantedKinds:
        """The kind in which each layer's weight is wanted, without layers that gain nothing. With lossy.only, every
        layer has one, and so have the keys and values of the cross attention, which are multiplied in the model's
        type."""
        dtype = call.latent.dtype
        kinds = self._kinds_for(lossy, call)
        every = self._products_of(lossy, layout, call)
        # The nearest to the model's type.
        otherwise = kinds[-1] if lossy.only else None

        def find() -> WantedKinds:
            found = {name: self.best(product, dtype, kinds) or otherwise for name, product in every.items()}
            if lossy.only:
                found |= dict.fromkeys(prompt_layers(layout), otherwise)
            return {name: kind for name, kind in found.items() if kind is not None}

        question = every, layout, dtype, kinds, self._changes, current_card()
        return self._once("wanted alone" if lossy.only else "wanted", question, find)

    def why_none_here(self, lossy: Lossy, layout: Any, call: Call) -> str | None:
        """Why this call gains nothing by products in eight bits, in one sentence; None if it does, or may."""
        dtype = call.latent.dtype
        kinds = self._kinds_for(lossy, call)
        total = 0.0
        names = " or ".join(kind.name.upper() for kind in kinds)
        every = self._products_of(lossy, layout, call)
        # With only, memory is gained.
        if self.everywhere or (every and lossy.only):
            return None
        if not every:
            return f"this UNet's matrix products are too small to gain by {names}"
        for product, count in Counter(every.values()).items():
            gains = [self.gains(product, dtype, kind) for kind in kinds]
            if None in gains:
                return None
            total += max((gain or 0.0 for gain in gains), default=0.0) * count
        if total > WORTH_LOOKING_MS:
            return None
        return f"at this size the matrix products gain nothing by {names} on this machine (measured)"

    def working_bytes(self, lossy: Lossy, layout: Any, call: Call) -> int:
        """About the bytes that a call takes on the GPU beside weights."""
        widest = max((one.rows * one.out for one in self._products_of(lossy, layout, call).values()), default=0)
        return WIDEST_OUTPUTS * widest * call.latent.element_size()

    def _kinds_for(self, lossy: Lossy, call: Call) -> tuple[Kind, ...]:
        return self.kinds(KINDS_OF[lossy.low_bit], call.latent.device, call.latent.dtype)

    def _products_of(self, lossy: Lossy, layout: Any, call: Call) -> Mapping[str, Product]:
        """The product of every layer that may be in eight bits, by its name."""
        batch = call.latent.shape[0]
        height, width = call.latent.shape[-2:]
        # Only linear layers replace the host's weights.
        convolves = call.latent.is_cuda and not lossy.only
        question = layout, batch, height, width, call.tokens, 0 if self.everywhere else None, convolves
        # One call may be asked about with only and without.
        what = "products alone" if lossy.only else "products"
        return self._once(what, (question, self._changes), lambda: low_bit_products(*question))

    def _once(self, what: str, question: object, find: Callable[[], Answer]) -> Answer:
        """The result of find(), kept until the question of this sort is another one."""
        known = self._answers.get(what)
        if known is None or known[0] != question:
            known = self._answers[what] = question, find()
        answer: Answer = known[1]
        return answer

    # --- what gains -----------------------------------------------------------------------------------------------

    def best(self, product: Product, dtype: torch.dtype, kinds: Sequence[Kind]) -> Kind | None:
        """The kind of these in which a product is computed, as was measured; None: in the model's type. Safe on any
        thread."""
        return self._known(current_card(), product, dtype, tuple(kinds))

    def _best(self, product: Product, dtype: torch.dtype, kinds: Sequence[Kind]) -> Kind | None:
        preferred = [kind for kind in KINDS if kind in kinds]
        if self.everywhere:
            return next(iter(preferred), None)
        times = {kind: ms for kind in preferred if (ms := self.measured(product, dtype, kind)) is not None}
        takes = {kind: rounded for kind, (plain, rounded) in times.items() if rounded < WORTH_ROUNDING * plain}
        if INT8 in takes:
            takes[INT8] /= WORTH_ROUNDING
        return min(takes, key=takes.__getitem__, default=None)

    def gains(self, product: Product, dtype: torch.dtype, kind: Kind) -> float | None:
        """The milliseconds that a product gains, 0 if they are too few; None if it was not measured."""
        times = self.measured(product, dtype, kind)
        if times is None:
            return None
        plain, rounded = times
        return plain - rounded if rounded < WORTH_ROUNDING * plain else 0.0

    def measured(self, product: Product, dtype: torch.dtype, kind: Kind) -> tuple[float, float] | None:
        """Milliseconds of a product in the model's type, and in eight bits; None if it was not measured."""
        value = self.tuning_cache.get(times_name(product, dtype, kind))
        if not (isinstance(value, list) and len(value) == 2 and all(isinstance(ms, (int, float)) for ms in value)):
            return None
        return value[0], value[1]

    def note(self, product: Product, dtype: torch.dtype, kind: Kind, plain: float, rounded: float) -> None:
        """Keep the milliseconds of a product; see measured."""
        self.tuning_cache.set(times_name(product, dtype, kind), [plain, rounded])
        self._ask_again()

    def tune(self, lossy: Lossy, layout: Any, call: Call, time_ms: TimeMs) -> bool:
        """Measure which of this call's products gain by eight bits, where that is not known. Returns whether it was
        measured. time_ms: how long work takes in a graph. Raises torch.cuda.OutOfMemoryError.
        """
        dtype = call.latent.dtype
        device = call.latent.device
        measured = False
        every = set() if self.everywhere else set(self._products_of(lossy, layout, call).values())
        for kind in self._kinds_for(lossy, call):
            for product in every:
                untimed = product, dtype, kind, current_card()
                if untimed in self._not_timed or self.gains(product, dtype, kind) is not None:
                    continue
                measured = True
                try:
                    self.measure(product, dtype, device, kind, time_ms)
                except torch.cuda.OutOfMemoryError:
                    raise
                except RuntimeError:
                    # The call is served without it.
                    self._not_timed.add(untimed)
                    log.warning("OneDiff: %s in %s cannot be timed", product, kind.name, exc_info=True)
        return measured

    def measure(
        self, product: Product, dtype: torch.dtype, device: torch.device, kind: Kind, time_ms: TimeMs
    ) -> None:
        """Measure a product in the model's type and in a kind."""
        result: Any = self._float8_support(device, dtype).result
        trial = trial_of(product, random_on(device, dtype), device, dtype, kind, result)
        if trial is not None:
            tuned(self._launches, trial, dtype, time_ms)
        way = way_of(product, dtype, device, kind)

        def plainly(one: Product, *given: Any) -> Kind | None:
            # The layer that makes the tokens of a GEGLU's consumer is in eight bits in both measurements.
            return kind if product.source == GATED and one.source == NORMED else None

        plain, rounded = (
            time_ms(functools.partial(way, self.operators(torch_ops.attention, choose)))
            for choose in (plainly, lambda *given: kind)
        )
        self.note(product, dtype, kind, plain, rounded)

    def forget(self) -> None:
        """Make every choice anew."""
        self._not_timed = set()
        self._ask_again()

    @contextlib.contextmanager
    def used_everywhere(self) -> Iterator[None]:
        """A context manager inside which everywhere is True."""
        self.everywhere = True
        self._ask_again()
        try:
            yield
        finally:
            self.everywhere = False
            self._ask_again()

    def _ask_again(self) -> None:
        self._known.cache_clear()
        self._changes += 1


def times_name(product: Product, dtype: torch.dtype, kind: Kind) -> str:
    shape = "x".join(map(str, (*product[:3], *(product.size or ()))))
    return named(f"{kind.name} product, {product.source}, {shape}, {str(dtype).removeprefix('torch.')}")

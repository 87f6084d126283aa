"""The 8-bit formats (FP8, INT8) that this machine supports, and the products that are faster in these formats, measured
once for each GPU model."""
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
from ....core.card import TuningCache, current_card, name_on_this_card
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
from ..tuning import product_trial
from .float8 import float8_support, unmet_requirement
from .timed_forwards import product_forward

log = logging.getLogger("onediff")
Found = TypeVar("Found")
# An 8-bit product must take less than this part of the exact product's time, and an INT8 product less than this part of
# the FP8 product's time: only short bursts are measured, and at its power limit an H100's clock fell by a tenth under
# INT8, but not under FP8 (.readme/measurements.md).
WORTH_ROUNDING = 0.9
# A call must gain more than this, in milliseconds: comparing the weights with those that were quantized takes 0.1 ms.
WORTH_LOOKING_MS = 0.15
# The memory of a forward besides weights, in outputs of its widest product: SDXL's graph at 1024x1024 takes 348 MiB,
# which is 4.1 outputs, and a call without a graph slightly more.
WIDEST_OUTPUTS = 5


class LowBit:
    """Chooses the format of each layer of a call that may be computed in eight bits, and measures the times on which
    the choice depends: those of each product in the model's dtype and in the 8-bit formats.

    A layer gets a format if its product was measured to be faster in that format. With lossy.only, which is for memory
    and not for speed, every layer that can be in eight bits gets a format.

    tuning_cache: keeps the measured times. launches: the launch configs of our kernels.
    quantizes_every_layer: choose eight bits for every layer, even if that is slower. This way, the effect of rounding
        on images can be judged with small models, whose products gain nothing; see every_layer_quantized().

    layout, in the methods: the network's. lossy: the settings that allow eight bits. The methods with a call need a
    device that supports a format of lossy.low_bit for the call's dtype (why_not() is None). The runtime's BackendChoice
    looks for that before it chooses a lossy route.
    """

    quantizes_every_layer = False

    def __init__(self, tuning_cache: TuningCache, launches: Launches) -> None:
        self.tuning_cache = tuning_cache
        self._launches = launches
        self._float8_support = functools.cache(float8_support)
        # The results of _best(), by GPU and arguments.
        self._known = functools.cache(lambda card, *arguments: self._best(*arguments))
        # (inputs, result) by name; see _once.
        self._results: dict[str, tuple[object, Any]] = {}
        # Products that could not be timed in this process. They are computed in the model's dtype.
        self._not_timed: set[tuple[Product, torch.dtype, Kind, int]] = set()
        # Increased when measurements or quantizes_every_layer change; among the inputs of results that depend on these.
        self._changes = 0

    # --- the machine ----------------------------------------------------------------------------------------------

    def why_not(self, option: str, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why a device supports none of the option's formats for a model of this dtype, in one sentence for the user;
        None if it supports one. Of several formats, the sentence is about the last one, INT8: it has the lowest
        requirements. option: "fp8", "int8" or "auto", as Settings.low_bit."""
        wanted = KINDS_OF[option]
        return None if self.kinds(wanted, device, dtype) else self._lack(wanted[-1], device, dtype)

    def kinds(self, wanted: Sequence[Kind], device: torch.device, dtype: torch.dtype) -> tuple[Kind, ...]:
        """The formats in `wanted` that a device supports for a model of this dtype, in the same order; empty if none.
        The first time with FP8 for a device and dtype, it computes small products on the device."""
        return tuple(kind for kind in wanted if self._lack(kind, device, dtype) is None)

    def _lack(self, kind: Kind, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why a device does not support a format for a model of this dtype, in one sentence; None if it does. For FP8,
        products are also tried, once for each device and dtype."""
        return unmet_requirement(kind, device, dtype) if kind is INT8 else self._float8_support(device, dtype).reason

    def quantizer(self) -> Round:
        """The function with which weights are quantized: our kernel; see rounding.rounded_rows."""
        return rounding.rounded_rows

    def operators(
        self, attention: Callable[[Tensor, Tensor, Tensor, bool], Tensor], choose: Any = None
    ) -> Operators:
        """New operators of ours, which compute layers with 8-bit weights in eight bits. attention: computes attention,
        as Operators.attention. choose: chooses the format of a product, as input_formats.Choose; None: best() chooses.
        """
        # The operators call this where an input is in float8, so the device has float8 products and result is a dtype;
        # for INT8 alone they do not call it.
        result: Any = lambda device, dtype: self._float8_support(device, dtype).result  # noqa: E731
        return NativeOperators(self._launches, attention, result, choose or self.best)

    # --- the layers of a call -------------------------------------------------------------------------------------

    def classes(self, layout: Any) -> Mapping[str, str]:
        """The class of every layer that can be in eight bits, by the layer's name. A class is the role of linear layers
        in their blocks, such as a feed-forward's first, or all convolutions. The runtime measures errors by class, to
        leave classes with large errors in 16 bits."""
        return self._once("classes", layout, lambda: {one.name: one.layer_class for one in every_low_bit_layer(layout)})

    def wanted(self, lossy: Lossy, layout: Any, call: Call) -> WantedKinds:
        """The 8-bit format of each layer's weight for a call, by the layer's name. Layers that gain nothing, or were
        not measured yet, are left out and stay in the model's dtype.

        With lossy.only, all layers that can be in eight bits are in the result, except convolutions: those that gain
        nothing get the supported format with the smallest rounding error. Even the keys and values of cross-attentions
        are stored in eight bits; their weights are decoded, and multiplied in the model's dtype.
        """
        dtype = call.latent.dtype
        kinds = self._kinds_for(lossy, call)
        every = self._products_of(lossy, layout, call)
        # The format with the smallest rounding error.
        otherwise = kinds[-1] if lossy.only else None

        def find() -> WantedKinds:
            found = {name: self.best(product, dtype, kinds) or otherwise for name, product in every.items()}
            if lossy.only:
                found |= dict.fromkeys(prompt_layers(layout), otherwise)
            return {name: kind for name, kind in found.items() if kind is not None}

        inputs = every, layout, dtype, kinds, self._changes, current_card()
        return self._once("wanted, low-bit only" if lossy.only else "wanted", inputs, find)

    def why_none_here(self, lossy: Lossy, layout: Any, call: Call) -> str | None:
        """Why this call does not gain by 8-bit products, in one sentence for the user: its layers are too small, or its
        products gain WORTH_LOOKING_MS or less together. None if it gains, if a product was not measured yet, with
        lossy.only, which is not for speed, or with quantizes_every_layer."""
        dtype = call.latent.dtype
        kinds = self._kinds_for(lossy, call)
        total = 0.0
        names = " or ".join(kind.name.upper() for kind in kinds)
        every = self._products_of(lossy, layout, call)
        # Low-bit only is for memory, not for speed.
        if self.quantizes_every_layer or (every and lossy.only):
            return None
        if not every:
            return f"the layers of this model are too small to be faster in {names}"
        for product, count in Counter(every.values()).items():
            gains = [self.gains(product, dtype, kind) for kind in kinds]
            if None in gains:
                return None
            total += max((gain or 0.0 for gain in gains), default=0.0) * count
        if total > WORTH_LOOKING_MS:
            return None
        return f"measured on this machine, the model is not faster in {names} at this size"

    def working_bytes(self, lossy: Lossy, layout: Any, call: Call) -> int:
        """An estimate of the bytes that a call takes on the GPU besides weights: WIDEST_OUTPUTS times the output of its
        largest product. 0 if no layer can be in eight bits."""
        widest = max((one.rows * one.out for one in self._products_of(lossy, layout, call).values()), default=0)
        return WIDEST_OUTPUTS * widest * call.latent.element_size()

    def _kinds_for(self, lossy: Lossy, call: Call) -> tuple[Kind, ...]:
        """The formats of the option lossy.low_bit that the call's device supports for the call's dtype, FP8 before
        INT8."""
        return self.kinds(KINDS_OF[lossy.low_bit], call.latent.device, call.latent.dtype)

    def _products_of(self, lossy: Lossy, layout: Any, call: Call) -> Mapping[str, Product]:
        """The matrix product, with its sizes in this call, of every layer that may be in eight bits, by the layer's
        name. With lossy.only or without a GPU, convolutions are left out. Empty if all layers are too small."""
        batch = call.latent.shape[0]
        height, width = call.latent.shape[-2:]
        # With lossy.only, convolutions keep the host's weights.
        convolves = call.latent.is_cuda and not lossy.only
        inputs = layout, batch, height, width, call.tokens, 0 if self.quantizes_every_layer else None, convolves
        # One call may need both results, with lossy.only and without.
        name = "products, low-bit only" if lossy.only else "products"
        return self._once(name, (inputs, self._changes), lambda: low_bit_products(*inputs))

    def _once(self, name: str, inputs: object, find: Callable[[], Found]) -> Found:
        """The result of find(). It is kept under `name`, and returned without another find() while `inputs` equal those
        of that time. One result is kept for each name. Choices are needed at every call, and take too long to find.

        inputs: everything that the result depends on. Nothing else drops a result, so _changes must be among the inputs
            if find() reads measurements or quantizes_every_layer.
        """
        known = self._results.get(name)
        if known is None or known[0] != inputs:
            known = self._results[name] = inputs, find()
        found: Found = known[1]
        return found

    # --- measurements ---------------------------------------------------------------------------------------------

    def best(self, product: Product, dtype: torch.dtype, kinds: Sequence[Kind]) -> Kind | None:
        """The fastest of these formats for a product, by the measurements on the current GPU; None if the model's dtype
        is best, or if nothing was measured yet. A format must take less than WORTH_ROUNDING of the time in the model's
        dtype, and INT8 less than WORTH_ROUNDING of the time in FP8.

        dtype: the model's. With quantizes_every_layer, the result is FP8 if it is among the formats, otherwise INT8,
        without regard to times. May be called in any thread.
        """
        return self._known(current_card(), product, dtype, tuple(kinds))

    def _best(self, product: Product, dtype: torch.dtype, kinds: Sequence[Kind]) -> Kind | None:
        """best(), but computed anew from the tuning cache."""
        preferred = [kind for kind in KINDS if kind in kinds]
        if self.quantizes_every_layer:
            return next(iter(preferred), None)
        times = {kind: ms for kind in preferred if (ms := self.measured(product, dtype, kind)) is not None}
        takes = {kind: rounded for kind, (plain, rounded) in times.items() if rounded < WORTH_ROUNDING * plain}
        if INT8 in takes:
            takes[INT8] /= WORTH_ROUNDING
        return min(takes, key=takes.__getitem__, default=None)

    def gains(self, product: Product, dtype: torch.dtype, kind: Kind) -> float | None:
        """The milliseconds by which a product is faster in a format; 0.0 if the format does not take less than
        WORTH_ROUNDING of the time in the model's dtype; None if it was not measured."""
        times = self.measured(product, dtype, kind)
        if times is None:
            return None
        plain, rounded = times
        return plain - rounded if rounded < WORTH_ROUNDING * plain else 0.0

    def measured(self, product: Product, dtype: torch.dtype, kind: Kind) -> tuple[float, float] | None:
        """(milliseconds in the model's dtype, milliseconds in this format) of a product, from the tuning cache; None if
        it was not measured on this GPU model, or the stored value is damaged."""
        value = self.tuning_cache.get(times_name(product, dtype, kind))
        if not (isinstance(value, list) and len(value) == 2 and all(isinstance(ms, (int, float)) for ms in value)):
            return None
        return value[0], value[1]

    def note(self, product: Product, dtype: torch.dtype, kind: Kind, plain: float, rounded: float) -> None:
        """Store the measured milliseconds of a product in the model's dtype (plain) and in this format (rounded).
        Choices that depend on measurements are made again at the next call."""
        self.tuning_cache.set(times_name(product, dtype, kind), [plain, rounded])
        self._forget_choices()

    def tune(self, lossy: Lossy, layout: Any, call: Call, time_ms: TimeMs) -> bool:
        """Measure which of this call's products are faster in eight bits, for those that were not measured on this GPU
        model. Returns whether any was measured or tried; False with quantizes_every_layer. If a product cannot be
        timed, a warning is logged, and it stays in the model's dtype until forget().

        time_ms: time_ms(work) returns the milliseconds of work() as a CUDA graph. Raises torch.cuda.OutOfMemoryError.
        """
        dtype = call.latent.dtype
        device = call.latent.device
        measured = False
        every = set() if self.quantizes_every_layer else set(self._products_of(lossy, layout, call).values())
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
                    # The call is served with this product in the model's dtype.
                    self._not_timed.add(untimed)
                    message = "OneDiff: some layers stay in 16 bits, because their speed in %s cannot be measured (%s)"
                    log.warning(message, kind.name.upper(), product, exc_info=True)
        return measured

    def measure(
        self, product: Product, dtype: torch.dtype, device: torch.device, kind: Kind, time_ms: TimeMs
    ) -> None:
        """Measure a product in the model's dtype and in a format, each with its neighbours (timed_forwards.py), and
        store both times. The launch config of the product's kernel is measured first, if it is unknown. Raises what a
        launch or time_ms raises."""
        result: Any = self._float8_support(device, dtype).result
        trial = product_trial(product, random_on(device, dtype), device, dtype, kind, result)
        if trial is not None:
            tuned(self._launches, trial, dtype, time_ms)
        forward = product_forward(product, dtype, device, kind)

        def plainly(one: Product, *given: Any) -> Kind | None:
            # In a feed-forward, the first product is in eight bits in both measurements, so that they differ only in
            # the second one.
            return kind if product.source == GATED and one.source == NORMED else None

        plain, rounded = (
            time_ms(functools.partial(forward, self.operators(torch_ops.attention, choose)))
            for choose in (plainly, lambda *given: kind)
        )
        self.note(product, dtype, kind, plain, rounded)

    def forget(self) -> None:
        """Try again to time the products that could not be timed, and make the choices that depend on measurements
        again at the next call. Times in the tuning cache stay, and the next choices use them."""
        self._not_timed = set()
        self._forget_choices()

    @contextlib.contextmanager
    def every_layer_quantized(self) -> Iterator[None]:
        """A context in which quantizes_every_layer is True, for tests and measurements of errors. At its beginning and
        at its end, the choices that depend on it are made again."""
        self.quantizes_every_layer = True
        self._forget_choices()
        try:
            yield
        finally:
            self.quantizes_every_layer = False
            self._forget_choices()

    def _forget_choices(self) -> None:
        """Let the next call find again what depends on measurements or quantizes_every_layer, which have changed: drops
        the results of best(), and increases _changes. Results of _once without _changes among their inputs stay."""
        self._known.cache_clear()
        self._changes += 1


def times_name(product: Product, dtype: torch.dtype, kind: Kind) -> str:
    """The name of a product's times in the tuning cache. It includes the current GPU's model."""
    shape = "x".join(map(str, (*product[:3], *(product.size or ()))))
    return name_on_this_card(f"{kind.name} product, {product.source}, {shape}, {str(dtype).removeprefix('torch.')}")

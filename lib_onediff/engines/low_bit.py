"""Products in eight bits on this machine: which kinds there are, which pay, and how they are launched."""
from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ..model.call import UNetCall
from ..model.layout import UNetLayout
from ..model.low_bit import FP8, GATED, INT8, KINDS, NORMED, Kind, Round, WantedKinds
from ..model.operators import Operators
from ..ops.attention import Attention
from ..ops.attention_tuning import Shape, random_inputs
from ..ops.card import current_card
from ..ops.quantized.attention_gains import AttentionChoice, AttentionPlan, names
from ..ops.quantized.gains import Plan, Product, ProductChoice, TimeMs, suited
from ..ops.quantized.scaled_mm import Float8Support, support
from ..ops.quantized.support import why_no_int8
from ..ops.quantized.ways import way_of
from ..ops.triton.launch_config import Launches
from ..ops.tuning_cache import TuningCache
from . import FLOAT8, LOW_BIT, LOW_BIT_ONLY, OFFLOADING, WITH_ATTENTION, WITHOUT_ATTENTION
from . import INT8 as INT8_BACKEND

log = logging.getLogger("onediff")
# The kinds of eight bits in which a backend has products.
KINDS_OF: dict[str, tuple[Kind, ...]] = {FLOAT8: (FP8,), INT8_BACKEND: (INT8,), LOW_BIT: KINDS}
KINDS_OF |= {only: KINDS_OF[backend] for backend, only in LOW_BIT_ONLY.items()}
KINDS_OF |= {attending: KINDS_OF[backend] for backend, attending in WITH_ATTENTION.items()}
# Beside the classes of layers (model.low_bit), what else can be in eight bits.
SELF_ATTENTION = "self-attention"


class LowBit:
    """What the backends of WITH_LOW_BIT need besides the native one's kernels."""

    def __init__(self, tuning_cache: TuningCache, launches: Launches, attention: Attention) -> None:
        self.tuning_cache = tuning_cache
        self.choice = ProductChoice(tuning_cache)
        self.plan = Plan(self.choice)
        self.attention = AttentionChoice(tuning_cache, lambda: self.choice.everywhere)
        self._attentions = AttentionPlan()
        self._classes_of: UNetLayout | None = None
        self._classes: Mapping[str, str] = {}
        self._launches, self._attention = launches, attention
        self._float8: dict[tuple[torch.device, torch.dtype], Float8Support] = {}
        # What could not be timed: tried once in a process, and decided as on an H200.
        self._not_timed: set[tuple[Product | Shape, torch.dtype, Kind, int]] = set()

    def why_not(self, backend: str, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why a backend's products cannot be had on a device for a model of this dtype, in one sentence; None if they
        can."""
        lacks = [self._lack(kind, device, dtype) for kind in KINDS_OF[backend]]
        # Of all kinds, int8 asks for the least.
        return None if None in lacks else lacks[-1]

    def kinds(self, backend: str, device: torch.device, dtype: torch.dtype) -> tuple[Kind, ...]:
        """The kinds of a backend's products that a device has; none for a backend that has no such products."""
        return tuple(kind for kind in KINDS_OF.get(backend, ()) if self._lack(kind, device, dtype) is None)

    def _lack(self, kind: Kind, device: torch.device, dtype: torch.dtype) -> str | None:
        return why_no_int8(device, dtype) if kind is INT8 else self._float8_support(device, dtype).reason

    def _float8_support(self, device: torch.device, dtype: torch.dtype) -> Float8Support:
        found = self._float8.get((device, dtype))
        if found is None:
            found = self._float8[device, dtype] = support(device, dtype)
        return found

    # None where there are no products in float8: then nobody asks.
    def _float8_result(self, device: torch.device, dtype: torch.dtype) -> Any:
        return self._float8_support(device, dtype).result

    def quantizer(self) -> Round:
        """By what weights are rounded."""
        from ..ops.quantized.kernels import rounded_rows

        return rounded_rows

    def operators(self, backend: str) -> Operators:
        """Those of a backend. The weights that are there in eight bits tell what is done in them."""
        from ..ops.quantized.int8_attention import Int8Attention
        from ..ops.quantized.operators import LowBitOperators

        with_attention = backend in WITHOUT_ATTENTION
        exact, attends = self._attention, self.attention.serves
        attention = Int8Attention(exact, attends, self._launches) if with_attention else exact
        return LowBitOperators(self._launches, attention, self._float8_result, self.choice.best)

    def wanted(self, backend: str, layout: UNetLayout, call: UNetCall) -> WantedKinds:
        """The kinds in which the weights of each layer are wanted for a call."""
        dtype = call.latent.dtype
        kinds = self.kinds(backend, call.latent.device, dtype)
        every, convolutions = backend in OFFLOADING, self._convolves(backend, call)
        return self.plan.wanted(*size_of(layout, call), dtype, kinds, every, convolutions)

    def _counted(self, backend: str, layout: UNetLayout, call: UNetCall) -> Counter[Product]:
        return self.plan.counted(*size_of(layout, call), self._convolves(backend, call))

    def _convolves(self, backend: str, call: UNetCall) -> bool:
        """Whether convolutions may be in eight bits. What takes the place of the host's weights is linear layers'."""
        device = call.latent.device
        if device.type != "cuda" or backend in OFFLOADING or FP8 not in self.kinds(backend, device, call.latent.dtype):
            return False
        # Without Triton, this cannot be imported.
        from ..ops.quantized import convolution

        return convolution.serves(device)

    def why_none_here(self, backend: str, layout: UNetLayout, call: UNetCall) -> str | None:
        """Why this call gains nothing by a backend's products, in one sentence; None where it does, or may."""
        dtype = call.latent.dtype
        kinds = self.kinds(backend, call.latent.device, dtype)
        wanted = self._counted(backend, layout, call)
        # Where the GPU holds no other weights, it is memory that is gained.
        return None if wanted and backend in OFFLOADING else self.choice.why_none(wanted, dtype, kinds)

    def tune(
        self, backend: str, layout: UNetLayout, call: UNetCall, native: Operators, time_ms: TimeMs
    ) -> bool:
        """Measure which of this call's products gain by a backend's kinds, where that is not known; whether it was so.
        time_ms: how long work takes in a graph. Raises torch.cuda.OutOfMemoryError.
        """
        dtype, device, measured = call.latent.dtype, call.latent.device, False
        if self.choice.everywhere:
            return False
        for kind in self.kinds(backend, device, dtype):
            for one in self._counted(backend, layout, call):
                if kind not in suited(one, [kind]) or (one, dtype, kind, current_card()) in self._not_timed:
                    continue
                if self.choice.gains(one, dtype, kind) is not None:
                    continue
                measured = True
                try:
                    self.measure(one, dtype, device, kind, native, time_ms)
                except torch.cuda.OutOfMemoryError:
                    raise
                except RuntimeError:
                    # The call can be served all the same.
                    self._not_timed.add((one, dtype, kind, current_card()))
                    log.warning("OneDiff: %s in %s cannot be timed", one, kind.name, exc_info=True)
        return measured

    def measure(
        self, product: Product, dtype: torch.dtype, device: torch.device, kind: Kind, native: Operators,
        time_ms: TimeMs,
    ) -> None:
        """Measure what a product gains by a kind, by the native operators and in eight bits."""
        from ..ops.quantized.operators import LowBitOperators
        from ..ops.quantized.tuning import tune_convolution, tune_gated, tune_int8

        if kind is INT8:
            tune_int8(self._launches, product, dtype, device, time_ms)
        elif product.size is not None:
            tune_convolution(self._launches, product, dtype, device, time_ms)
        elif product.source == GATED:
            tune_gated(self._launches, product, dtype, device, self._float8_result(device, dtype), time_ms)
        made_by = partial(LowBitOperators, self._launches, self._attention, self._float8_result)
        always, way = made_by(lambda *given: kind), way_of(product, dtype, device, (kind,))
        plain = native
        if product.source == GATED:
            # What makes its tokens is in eight bits both ways.
            plain = made_by(lambda one, *given: kind if one.source == NORMED else None)
        self.choice.measure(product, dtype, kind, lambda: way(plain), lambda: way(always), time_ms)

    # --- attention ----------------------------------------------------------------------------------------------------

    def why_no_attention(self, layout: UNetLayout, call: UNetCall) -> str | None:
        """Why this call's self attention is not in INT8, in one sentence; None where it is, or may be."""
        if call.upcast_attention:
            return "attention is not in INT8 where it is computed in float32"
        dtype, shapes = call.latent.dtype, self._attention_shapes(layout, call)
        lack = why_no_int8(call.latent.device, dtype)
        if lack is not None:
            return lack
        timed = [shape for shape in shapes if (shape, dtype, INT8, current_card()) not in self._not_timed]
        if shapes and not timed:
            return "attention in INT8 could not be measured here (the log says why)"
        return self.attention.why_none(timed, dtype)

    def tune_attention(self, layout: UNetLayout, call: UNetCall, time_ms: TimeMs) -> bool:
        """As tune, for this call's self attentions."""
        dtype, device, measured = call.latent.dtype, call.latent.device, False
        if self.choice.everywhere or call.upcast_attention:
            return False
        for shape in self._attention_shapes(layout, call):
            one = shape, dtype, INT8, current_card()
            if one in self._not_timed or self.attention.gains(shape, dtype) is not None:
                continue
            measured = True
            try:
                self.measure_attention(shape, dtype, device, time_ms)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception:
                # The call can be served all the same.
                self._not_timed.add(one)
                log.warning("OneDiff: attention in INT8 at %s cannot be timed", shape, exc_info=True)
        return measured

    def measure_attention(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, time_ms: TimeMs
    ) -> None:
        """Measure what self attention of a shape (batch, heads, tokens, width) gains by INT8, against the fastest exact
        one. Raises RuntimeError where it is wrong, and what Triton raises."""
        from ..ops.quantized.int8_attention import Int8Attention
        from ..ops.quantized.tuning import tune_int8_attention

        exact, rounded = self._attention, Int8Attention(self._attention, lambda *given: True, self._launches)
        exact.measure(shape, shape, dtype, device)
        inputs = random_inputs(shape, shape, dtype, device)
        tune_int8_attention(self._launches, inputs, time_ms)
        expected = exact(*inputs, upcast=True)
        self.attention.measure(shape, dtype, lambda: exact(*inputs), lambda: rounded(*inputs), expected, time_ms)

    def attentions(self, layout: UNetLayout, call: UNetCall) -> WantedKinds:
        """The self attentions that a call has in INT8, by names of their own, as layers."""
        shapes, dtype = self._attentions.shapes(*size_of(layout, call)), call.latent.dtype
        return {name: (INT8,) for name, shape in shapes.items() if self.attention.serves(shape, dtype)}

    def classes(self, layout: UNetLayout) -> Mapping[str, str]:
        """The class of every layer and self attention that can be in eight bits."""
        if layout is not self._classes_of:
            self._classes = {**self.plan.classes(layout), **dict.fromkeys(names(layout), SELF_ATTENTION)}
            self._classes_of = layout
        return self._classes

    def _attention_shapes(self, layout: UNetLayout, call: UNetCall) -> list[Shape]:
        return list(dict.fromkeys(self._attentions.shapes(*size_of(layout, call)).values()))

    def forget(self) -> None:
        """Trust no choice that was made before."""
        self.choice.forget()
        self.attention.forget()
        self._not_timed.clear()


def size_of(layout: UNetLayout, call: UNetCall) -> tuple[UNetLayout, int, int, int]:
    batch, _, height, width = call.latent.shape
    return layout, height, width, batch

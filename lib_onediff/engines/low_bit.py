"""Products in eight bits on this machine: which kinds there are, which pay, and how they are launched."""
from __future__ import annotations

import logging
from typing import Any

import torch

from ..model.call import UNetCall
from ..model.layout import UNetLayout
from ..model.low_bit import FP8, INT8, KINDS, Kind, Round, WantedKinds
from ..model.operators import Operators
from ..ops.attention import Attention
from ..ops.quantized.gains import Plan, Product, ProductChoice, TimeMs, suited, way_of
from ..ops.quantized.scaled_mm import Float8Support, support
from ..ops.quantized.support import why_no_int8
from ..ops.triton.launch_config import Launches
from ..ops.tuning_cache import TuningCache
from . import FLOAT8, LOW_BIT, LOW_BIT_ONLY, OFFLOADING
from . import INT8 as INT8_BACKEND

log = logging.getLogger("onediff")
# The kinds of eight bits in which a backend has products.
KINDS_OF: dict[str, tuple[Kind, ...]] = {FLOAT8: (FP8,), INT8_BACKEND: (INT8,), LOW_BIT: KINDS}
KINDS_OF |= {only: KINDS_OF[backend] for backend, only in LOW_BIT_ONLY.items()}


class LowBit:
    """What the backends of WITH_LOW_BIT need besides the native one's kernels."""

    def __init__(self, tuning_cache: TuningCache, launches: Launches, attention: Attention) -> None:
        self.tuning_cache = tuning_cache
        self.choice = ProductChoice(tuning_cache)
        self.plan = Plan(self.choice)
        self._launches, self._attention = launches, attention
        self._float8: dict[tuple[torch.device, torch.dtype], Float8Support] = {}
        # What could not be timed: tried once in a process, and decided as on an H200.
        self._not_timed: set[tuple[Product, torch.dtype, Kind | None]] = set()

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

    def operators(self) -> Operators:
        """Those of all these backends: the weights that are there in eight bits tell what is done in them."""
        from ..ops.quantized.operators import LowBitOperators

        return LowBitOperators(self._launches, self._attention, self._float8_result, self.choice.best)

    def wanted(self, backend: str, layout: UNetLayout, call: UNetCall) -> WantedKinds:
        """The kinds in which the weights of each layer are wanted for a call."""
        dtype = call.latent.dtype
        kinds = self.kinds(backend, call.latent.device, dtype)
        size = self._size(backend, layout, call)
        return self.plan.wanted(*size, dtype, kinds, every=backend in OFFLOADING)

    def _size(
        self, backend: str, layout: UNetLayout, call: UNetCall
    ) -> tuple[UNetLayout, int, int, int, bool]:
        """What a Plan is asked with: the layout, the latent's height and width, the batch, and whether convolutions may
        be in eight bits. What takes the place of the host's weights is linear layers'."""
        batch, _, height, width = call.latent.shape
        device = call.latent.device
        kinds = () if backend in OFFLOADING else self.kinds(backend, device, call.latent.dtype)
        return layout, height, width, batch, FP8 in kinds and self._convolves(device)

    # A test lets a CPU convolve.
    def _convolves(self, device: torch.device) -> bool:
        if device.type != "cuda":
            return False
        from ..ops.quantized import convolution

        return convolution.serves(device)

    def why_none_here(self, backend: str, layout: UNetLayout, call: UNetCall) -> str | None:
        """Why this call gains nothing by a backend's products, in one sentence; None where it does, or may."""
        dtype = call.latent.dtype
        kinds = self.kinds(backend, call.latent.device, dtype)
        wanted = self.plan.counted(*self._size(backend, layout, call))
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
            for one in self.plan.counted(*self._size(backend, layout, call)):
                if kind not in suited(one, [kind]) or (one, dtype, kind) in self._not_timed:
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
                    self._not_timed.add((one, dtype, kind))
                    log.warning("OneDiff: %s in %s cannot be timed", one, kind.name, exc_info=True)
        if FP8 in self.kinds(backend, device, dtype):
            measured |= self._tune_gated(backend, layout, call, time_ms)
        return measured

    def _tune_gated(self, backend: str, layout: UNetLayout, call: UNetCall, time_ms: TimeMs) -> bool:
        """As tune, for the feed-forward's first products in float8: how they are done with their GEGLU."""
        from ..ops.quantized.tuning import gated_is_known, tune_gated

        dtype, device, measured = call.latent.dtype, call.latent.device, False
        for one in self.plan.gated(*self._size(backend, layout, call)):
            if (one, dtype, None) in self._not_timed or gated_is_known(self._launches, one, dtype, device):
                continue
            if self.choice.best(one, dtype, [FP8.dtype]) is None:
                continue
            measured = True
            try:
                tune_gated(self._launches, one, dtype, device, self._float8_result(device, dtype), time_ms)
            except torch.cuda.OutOfMemoryError:
                raise
            except RuntimeError:
                self._not_timed.add((one, dtype, None))
                log.warning("OneDiff: %s with its GEGLU cannot be timed", one, exc_info=True)
        return measured

    def measure(
        self, product: Product, dtype: torch.dtype, device: torch.device, kind: Kind, native: Operators,
        time_ms: TimeMs,
    ) -> None:
        """Measure what a product gains by a kind, by the native operators and in eight bits."""
        from ..ops.quantized.operators import LowBitOperators
        from ..ops.quantized.tuning import tune_convolution, tune_int8

        if kind is INT8:
            tune_int8(self._launches, product, dtype, device, time_ms)
        elif product.size is not None:
            tune_convolution(self._launches, product, dtype, device, time_ms)
        always = LowBitOperators(self._launches, self._attention, self._float8_result, lambda *given: kind)
        way = way_of(product, dtype, device, (kind,))
        self.choice.measure(product, dtype, kind, lambda: way(native), lambda: way(always), time_ms)

    def forget(self) -> None:
        """Trust no choice that was made before."""
        self.choice.forget()
        self._not_timed.clear()

"""Which operators compute what on this machine."""
from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import engines as backends
from ..guard import first_line
from ..model.call import UNetCall
from ..model.layout import UNetLayout, UnsupportedUNet
from ..model.low_bit import KINDS_OF, Kind
from ..model.operators import Operators
from ..model.read import read_layout
from ..ops import torch_ops
from ..ops.attention import Attention
from ..ops.attention_tuning import attention_shapes, time_on_gpu
from ..ops.availability import how_to_be_fast_here, why_no_triton
from ..ops.card import on_card
from ..ops.sage import SageAttention
from ..ops.triton.launch_config import Launches
from ..ops.tuning_cache import TuningCache
from ..options.settings import Settings
from ..weights.contents import Place, Reader
from .low_bit import LowBit

log = logging.getLogger("onediff")


class Network(NamedTuple):
    """What decides which kernels are needed. users: descriptions of its layout. low_bit: the kinds of products in eight
    bits."""

    architecture: str
    users: Sequence[Any]
    dtype: torch.dtype
    device: torch.device
    low_bit: tuple[Kind, ...] = ()

    @property
    def kind(self) -> Hashable:
        """Networks of the same kind need the same kernels."""
        return self.architecture, self.dtype, self.device, self.low_bit


def read_contents(places: Sequence[Place], part: int) -> Callable[[], Tensor] | None:
    """See weights.contents.Reader."""
    from ..ops.triton.contents import sums_of

    try:
        launch = sums_of(places, part)
        if launch is not None:
            # It compiles now.
            launch()
        return launch
    except Exception:
        log.exception("the contents of weights are read by PyTorch's operators")
        return None


class OperatorSets:
    """The operators of every backend, made when they are first needed."""

    def __init__(self, tuning_cache: TuningCache) -> None:
        self.attention = Attention(tuning_cache)
        self._launches = Launches(tuning_cache)
        self.low_bit = LowBit(tuning_cache, self._launches)
        # Our own, by the name of their attention where it is lossy.
        self._made: dict[str, Operators] = {}
        self._wide_norms = torch_ops.WideNorms()
        self._why_not: dict[torch.device, str | None] = {}
        self._hint: str | None = None
        self._compiled: set[Hashable] = set()
        self._pending: set[Hashable] = set()
        self._tuned: set[Hashable] = set()
        # What the compiler said. Not its exception: the traceback would keep the UNet that was being called.
        self._failed: dict[Hashable, str] = {}
        self._worker = ThreadPoolExecutor(1, "onediff-kernels")
        self._lock = threading.Lock()

    def contents_reader(self, device: torch.device) -> Reader | None:
        """Reads the contents of many tensors on a device in one launch; None where torch's operators do it."""
        return None if device.type != "cuda" or self.why_not_native(device) is not None else read_contents

    def why_not_native(self, device: torch.device) -> str | None:
        """Why our kernels cannot run on a device, in one sentence; None if nothing is known to stand in the way."""
        if device not in self._why_not:
            self._why_not[device] = why_no_triton(device)
        return self._why_not[device]

    def hint(self) -> str:
        """How to get what makes OneDiff fast on this machine, in one or two sentences; "" where nothing is missing."""
        if self._hint is None:
            self._hint = how_to_be_fast_here() or ""
        return self._hint

    def of(self, backend: str, wide_norms: bool = False, attention: str = "") -> Operators:
        """The operators by which a backend computes. wide_norms: the host has norms in float32; kernels of ours always
        round once. attention: as Lossy.attention."""
        if backend != backends.NATIVE:
            return self._wide_norms if wide_norms else torch_ops
        with self._lock:
            name = attention or backend
            if name not in self._made:
                exact = self.attention
                self._made[name] = self.low_bit.operators(SageAttention(exact) if attention else exact)
        return self._made[name]

    def prepare(self, network: Network, waits_for_compile: bool) -> bool:
        """Whether the native kernels that a network needs are compiled; if not, they soon will be, in a thread.

        waits_for_compile: wait until they are. Raises RuntimeError with what the compiler said.
        """
        kind = network.kind
        if kind in self._compiled:
            return True
        if kind in self._failed:
            raise RuntimeError(self._failed[kind])
        if waits_for_compile or kind not in self._pending:
            self._pending.add(kind)
            compiling = self._worker.submit(self._compile, network)
            if waits_for_compile:
                compiling.result()
                return self.prepare(network, waits_for_compile=False)
        return False

    def prepare_early(self, unet: nn.Module, settings: Settings) -> Future[None] | None:
        """Begin to compile what the first calls of this UNet need. Returns what ends with that; None where there is
        nothing to do."""
        if not settings.enabled:
            return None
        parameter = next(unet.parameters(), None)
        if parameter is None or parameter.device.type not in ("cpu", "cuda"):
            return None
        device = parameter.device
        if device.type == "cpu" and torch.cuda.is_available():
            # A UNet that waits in the computer's memory goes to the GPU when it is used.
            device = torch.device("cuda", torch.cuda.current_device())
        return self._worker.submit(self._prepare_early, weakref.ref(unet), settings, parameter.dtype, device)

    def finish(self) -> None:
        """Wait for what was begun."""
        self._worker.submit(lambda: None).result()

    def _prepare_early(
        self, unet: weakref.ref[nn.Module], settings: Settings, dtype: torch.dtype, device: torch.device
    ) -> None:
        found = backends.candidates(settings.backend, device, self.why_not_native)
        present = unet()
        if found.backends[0] != backends.NATIVE or present is None:
            return
        with contextlib.suppress(UnsupportedUNet):
            layout = read_layout(present)
            # Compiling takes longer than a host may want to keep it.
            del present
            kinds = self.low_bit.kinds(KINDS_OF.get(settings.low_bit, ()), device, dtype)
            self._compile(Network(layout.architecture, layout.kernel_users, dtype, device, kinds))

    def _compile(self, network: Network) -> None:
        kind = network.kind
        if kind in self._compiled or kind in self._failed:
            return
        began = time.perf_counter()
        try:
            # Here, and not where the first call would wait: to import Triton takes half a second.
            self.of(backends.NATIVE)
            from ..ops.compile_kernels import compile_kernels

            with on_card(network.device):
                compile_kernels(network.users, network.dtype, network.device, self._launches, network.low_bit)
        except ImportError as error:
            # A half-removed Triton.
            self._failed[kind] = f"Triton cannot be imported ({error})"
            log.debug("%s", self._failed[kind], exc_info=True)
        except Exception as error:
            self._failed[kind] = first_line(error)
            log.exception("the kernels for %s do not compile", network.dtype)
        else:
            self._compiled.add(kind)
            log.debug("kernels for %s ready in %.1f s", network.dtype, time.perf_counter() - began)

    def tune(self, layout: UNetLayout, call: UNetCall) -> bool:
        """Measure which attention is the fastest for this call's shapes, where that is not known; whether it was so."""
        batch, _, height, width = call.latent.shape
        shapes = attention_shapes(layout, height, width, batch, call.context.shape[1])
        dtype = torch.float32 if call.upcast_attention else call.latent.dtype
        unknown = [pair for pair in shapes if self.attention.chosen(*pair, dtype) is None]
        for query, key in unknown:
            self.attention.measure(query, key, dtype, call.latent.device)
        return bool(unknown)

    def measure_anew(self) -> None:
        """Trust no choice that was made before: those that are still there are read again, the others measured."""
        self._tuned.clear()
        self.attention.forget()
        self.low_bit.forget()
        self._launches.forget()

    def tune_kernels(self, network: Network) -> None:
        """Measure how the kernels are best configured on this GPU, where that is not known: seconds, once on a machine.

        Where that fails, they stay as they are cut.
        """
        kind = network.kind
        if kind in self._tuned:
            return
        self._tuned.add(kind)
        began = time.perf_counter()
        try:
            from ..ops.triton.tuning import tune_kernels

            with on_card(network.device):
                count = tune_kernels(self._launches, network.users, network.dtype, network.device, time_on_gpu)
            log.debug("%d kernels measured in %.1f s", count, time.perf_counter() - began)
        except Exception as error:
            log.debug("the kernels could not be measured: %s", error, exc_info=True)

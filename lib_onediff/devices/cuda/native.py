"""The native backend: our own kernels, loaded before the first call, tuned on the machine, captured as CUDA graphs."""
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from ...core.call import Call
from ...core.card import TuningCache, on_card
from ...core.device import Device, KernelUse, TimeMs, Traits
from ...core.family import AttentionShapes
from ...core.guard import first_line
from ...core.leaves import LayerNorm
from ...core.operators import Operators
from ...core.refusal import Refusal
from ...core.settings import Settings
from ...weights.contents import PIECE, WORD, ContentsReader, MemorySpan
from ...weights.low_bit import FP8, INT8, KINDS, KINDS_OF, Kind
from ..torch.attention import Attention
from ..torch.device import refuse_without_gpu
from .kernels.launch_config import Launches
from .kernels.launching import launch, why_not
from .kernels.rounding import Rule, hosts_rule
from .kernels.tokens import ATTENTION_DTYPES as DTYPES
from .loading import load_candidates, load_kernels
from .low_bit.choice import LowBit
from .tuning import tune_down, tune_gated, tune_half_sums, tune_kernels, tune_stored

log = logging.getLogger("onediff")
# For the kernel that computes checksums: how many words a program sums, how many words it loads at once, and its warps.
# A word has WORD bytes.
WORDS = 1 << 13
BLOCK = 1024
WARPS = 4


def read_contents(spans: Sequence[MemorySpan], part: int) -> Callable[[], Tensor] | None:
    """A function that launches the checksums of these spans by our kernel; see sums_of. The kernel is loaded here, by a
    first launch, which reads the spans. None if the kernel cannot be used or fails, which is logged: the caller then
    uses PyTorch's operators. read_contents is a weights.contents.ContentsReader."""
    try:
        sums = sums_of(spans, part)
        if sums is not None:
            # Load the kernel now.
            sums()
        return sums
    except Refusal as reason:
        log.debug("checksums of weights are computed by PyTorch's operators: %s", reason)
        return None
    except Exception:
        log.exception("checksums of weights are computed by PyTorch's operators, because our kernel failed")
        return None


def sums_of(spans: Sequence[MemorySpan], part: int) -> Callable[[], Tensor] | None:
    """A function that launches the checksums (weights/contents.py) of these spans, and returns them as int64 (spans,)
    on their device, without waiting for them. It reads the spans' memory by address: its caller must make sure that the
    memory exists. None if the kernel does not support the spans: they are on several devices, or an address or a number
    of bytes is no multiple of WORD.

    spans: at least one. part: in a large matrix, only every part-th piece is summed; see MemorySpan.stride.
    """
    device = spans[0].device
    if any(span.device != device or span.nbytes % WORD or span.address % WORD for span in spans):
        return None
    counts = [span.nbytes // WORD for span in spans]
    steps = [span.stride(part) for span in spans]
    pieces = [-(-count // (PIECE * step)) * PIECE for count, step in zip(counts, steps, strict=True)]
    # One program sums one stretch of WORDS words; SDXL's weights have 160,000. For each, its span and first word.
    counted = torch.int64
    cpu = torch.device("cpu")
    stretches = torch.tensor([-(-count // WORDS) for count in pieces], dtype=counted, device=cpu)
    index = torch.repeat_interleave(torch.arange(len(spans), dtype=counted, device=cpu), stretches)
    before = (stretches.cumsum(0) - stretches)[index]
    start = (torch.arange(len(index), dtype=counted, device=cpu) - before) * WORDS
    addresses = [span.address for span in spans]
    table = [torch.tensor(numbers, dtype=counted, device=cpu) for numbers in (addresses, counts, steps)]
    table = [one.to(device) for one in (*table, index, start)]

    def read() -> Tensor:
        sums = torch.zeros(len(counts), dtype=torch.int64, device=device)
        launch(
            "contents.sum_words", (len(index),), *table, sums, warps=WARPS, PIECE=PIECE, BLOCK=BLOCK, WORDS=WORDS
        )
        return sums

    return read


class Native(Device):
    """The backend with our own kernels, for NVIDIA GPUs; see core.device.Device.

    tuning_cache: measurements of kernels on this machine.
    attention: computes attention; low_bit: chooses 8-bit formats.
    why_not: why_not(device) returns why our kernels cannot run on a device; None if they can.
    """

    name = "native"
    traits = Traits(has_graphs=True, launches_patched=False, channels_last=True, takes_lossy=True)

    def __init__(self, tuning_cache: TuningCache) -> None:
        self._launches = Launches(tuning_cache)
        self.attention = Attention(self._launches)
        self.low_bit = LowBit(tuning_cache, self._launches)
        self.why_not = cache(why_not)
        self._operators = self.low_bit.operators(self.attention)
        # By _kernel_set: why these kernels could not be loaded, "" if they were. Not an exception, whose traceback
        # would keep the network alive.
        self._loading: dict[Hashable, Future[str]] = {}
        self._tuned: set[Hashable] = set()
        self._worker = ThreadPoolExecutor(1, "onediff-kernels")
        self._lock = threading.Lock()

    def refuse(self, settings: Settings, device: torch.device, dtype: torch.dtype, is_warm_up: bool) -> None:
        """Raise Refusal, with the reason, if our kernels cannot run on this device. The other arguments make no
        difference here."""
        refuse_without_gpu(device)
        lack = self.why_not(device)
        if lack is not None:
            raise Refusal(lack)

    def why_not_lossy(self, option: str, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why a value of Settings.low_bit (option) has no effect for a model of this dtype on a device, in one sentence
        for the user; None if the device supports one of the option's formats."""
        return self.why_not(device) or self.low_bit.why_not(option, device, dtype)

    def contents_reader(self, device: torch.device) -> ContentsReader | None:
        """read_contents, which computes checksums of weights by our kernel; None if our kernels cannot run on this
        device."""
        return None if self.why_not(device) is not None else read_contents

    def operators(self, wide_norms: bool = False) -> Operators:
        """Our own operators, always the same object. wide_norms makes no difference: our kernels compute norms in
        float32 anyway."""
        return self._operators

    def prepare(self, use: KernelUse, time_ms: TimeMs | None = None) -> None:
        """Load the kernels that a network needs, and wait for them. time_ms: also measure their launch configs, once
        for each set of kernels in this process; see Device.prepare.

        Raises Refusal if loading failed, now or earlier: a failure is kept, so that later calls are refused at once.
        Raises torch.cuda.OutOfMemoryError, after which the next call tries again.
        """
        kernels = self._kernel_set(use)
        with self._lock:
            if kernels not in self._loading:
                self._loading[kernels] = self._worker.submit(self._load, use, *kernels[1:])
                if use.dtype in DTYPES:
                    # In the background, for later measurements.
                    self._worker.submit(load_candidates, use.dtype, use.device)
            loading = self._loading[kernels]
        try:
            failure = loading.result()
        except torch.cuda.OutOfMemoryError:
            # Try again at the next call.
            self._loading.pop(kernels, None)
            raise
        if failure:
            raise Refusal(failure)
        if time_ms is not None and kernels not in self._tuned:
            # Before the first output is checked, so that the kernels that are checked are those that will run.
            self._tuned.add(kernels)
            self._tune_kernels(use, time_ms)

    def _kernel_set(self, use: KernelUse) -> tuple[Hashable, tuple[Kind, ...], tuple[Rule, ...]]:
        """Which kernels a network needs: (a key of the network, the 8-bit formats, the rules). The three together are
        the key in _loading.

        The key is (architecture, dtype, device). The formats are those in the settings, and FP8 if the host stores
        weights in it, as far as the device supports them. The rules are for the inputs of layers that the host stores
        in INT8; () without such layers, or if the device does not support INT8.
        """
        stored = {dtype for dtype, _ in use.stored}
        wanted = KINDS_OF.get(use.low_bit, ())
        used = [kind for kind in KINDS if kind in wanted or kind.dtype in stored]
        supported = self.low_bit.kinds(used, use.device, use.dtype)
        low_bit = tuple(kind for kind in supported if kind in wanted or kind is FP8)
        rules = {hosts_rule(rotation, use.device) for dtype, rotation in use.stored if dtype == INT8.dtype}
        return (use.architecture, use.dtype, use.device), low_bit, tuple(sorted(rules)) if INT8 in supported else ()

    def _load(self, use: KernelUse, low_bit: Collection[Kind], rules: Collection[Rule]) -> str:
        """Load the kernels. Returns "" if they were loaded, otherwise the reason why not. Runs in the worker's thread.
        low_bit, rules: see _kernel_set. Raises torch.cuda.OutOfMemoryError."""
        began = time.perf_counter()
        try:
            with on_card(use.device):
                load_kernels(use.users, use.dtype, use.device, self._launches, low_bit, rules)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            log.debug("the kernels for %s cannot be loaded", use.dtype, exc_info=True)
            return first_line(error)
        log.debug("kernels for %s loaded in %.1f s", use.dtype, time.perf_counter() - began)
        return ""

    def tune(self, use: KernelUse, attentions: Sequence[AttentionShapes], call: Call, time_ms: TimeMs) -> bool:
        """Measure the fastest kernels for a call, if they are unknown: for attentions of these shapes, the gated
        products of its feed-forwards, and the products and convolutions that earlier calls have noted in Launches.
        Returns whether anything was measured; False without a GPU, or while a graph is captured."""
        dtype = torch.float32 if call.upcast_attention else call.latent.dtype
        device = call.latent.device
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return False
        measured = [
            self.attention.measure(one.queries, one.keys, dtype, device, time_ms, one.uncertain) for one in attentions
        ]
        if call.latent.dtype in DTYPES and any(isinstance(user, LayerNorm) for user in use.users):
            # A block with self-attention of several heads has a feed-forward with these rows and this width; in a
            # network with layer norms, it has a GEGLU.
            own = [one.queries for one in attentions if one.queries == one.keys and one.queries[1] > 1]
            sizes = {(q[0] * q[2], q[1] * q[3]) for q in own}
            measured += [tune_gated(self._launches, *size, call.latent.dtype, device, time_ms) for size in sizes]
        # Convolutions over more pixels than the latent has are those of a VAE, and may not fit into memory here.
        sizes_of_unet = [size for size in self._launches.convolutions if size[1] * size[2] <= call.latent[0, 0].numel()]
        measured += [tune_half_sums(self._launches, size, device, time_ms) for size in sizes_of_unet]
        stored = list(self._launches.stored_products)
        measured += [tune_stored(self._launches, product, device, time_ms) for product in stored]
        downs = list(self._launches.down_products)
        measured += [tune_down(self._launches, product, device, time_ms) for product in downs]
        return any(measured)

    def forget_measurements(self) -> None:
        """Forget the choices of kernels and formats in this process. The next calls read the choices from the tuning
        cache, and measure only those that it does not have. See Device.forget_measurements."""
        self._tuned.clear()
        self.low_bit.forget()
        self._launches.forget()

    def _tune_kernels(self, use: KernelUse, time_ms: TimeMs) -> None:
        """Measure the fastest launch configs of the kernels on this GPU, if unknown. Takes seconds, once on a machine.

        Raises nothing: if a measurement fails, it is logged, and the kernels keep their present launch configs.
        """
        began = time.perf_counter()
        try:
            with on_card(use.device):
                count = tune_kernels(self._launches, use.users, use.dtype, use.device, time_ms)
            log.debug("%d kernels measured in %.1f s", count, time.perf_counter() - began)
        except Exception as error:
            log.debug("the kernels could not be measured: %s", error, exc_info=True)

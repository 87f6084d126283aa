"""Attention by the implementation that was measured to be the fastest on this GPU."""
from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.backends import cuda as switches

try:
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    # torch 2.1 and 2.2.
    SDPBackend = sdpa_kernel = None

from ..modes import our_modes
from ..precision import switch_of
from .attention_tuning import Shape, TimeMs, fastest, random_inputs, time_on_gpu
from .choices import Choices

# torch: what torch picks by itself. gemm: ours, below.
TORCH, CUDNN, FLASH, EFFICIENT, MATH, GEMM = "torch", "cudnn", "flash", "efficient", "math", "gemm"
# What torch chooses from, by the names of its SDPBackend.
BACKENDS = {CUDNN: "CUDNN_ATTENTION", FLASH: "FLASH_ATTENTION", EFFICIENT: "EFFICIENT_ATTENTION", MATH: "MATH"}
# The switches as torch.backends.cuda calls it: name_sdp_enabled() and enable_name_sdp(bool).
SWITCHES = {CUDNN: "cudnn", FLASH: "flash", EFFICIENT: "mem_efficient", MATH: "math"}
# In every version torch takes the first that it may: cuDNN at either end, and the others in this order.
AHEAD = {FLASH: (CUDNN,), EFFICIENT: (CUDNN, FLASH), MATH: (CUDNN, FLASH, EFFICIENT)}
# Before torch 2.6 nothing but switching all others off gives cuDNN the first place, and other threads use the switches.
TAKES_PRIORITY = sdpa_kernel is not None and "set_priority" in inspect.signature(sdpa_kernel).parameters
# torch 2.8 and newer, on an NVIDIA GPU: a GEMM of half precision tensors into float32.
GEMM_WIDENS = "dtype_out" in torch.ops.aten.baddbmm.overloads() and torch.version.hip is None
# No kernel but "efficient" takes wider heads; torch's last resort holds all scores at once, 4 GiB for 1024x1024 pixels.
WIDEST_HEAD = 256
FEW_KEYS = 256
SCORES_BYTES = 64 << 20
# A class of shapes spans a factor of four in scores, and any batch.
MATH_SCORES_BYTES = 4 << 20


class Attention:
    """Softmax attention over (batch, heads, tokens, width), as torch's scaled_dot_product_attention.

    Picks by what measure() has found for shapes of the same class, and leaves the pick to torch where nothing was
    measured. On a CPU it is always torch's.
    """

    def __init__(self, choices: Choices, time_ms: TimeMs = time_on_gpu) -> None:
        self._choices = choices
        self._time_ms = time_ms
        self._picks: dict[tuple[int, int, int, torch.dtype], str] = {}
        # torch's switches are the whole process's: two of us that restore them must not overlap.
        self._switching = threading.Lock()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, upcast: bool = False) -> Tensor:
        """The mix of values, in query's dtype and shape. upcast: computed in float32."""
        if upcast and query.dtype != torch.float32:
            return self(query.float(), key.float(), value.float()).to(query.dtype)
        if query.device.type != "cuda":
            return functional.scaled_dot_product_attention(query, key, value)
        return self.run(self.pick(query.shape, key.shape, query.dtype), query, key, value)

    def pick(self, query_shape: Shape, key_shape: Shape, dtype: torch.dtype) -> str:
        """Which implementation serves these shapes on a GPU."""
        seen = (query_shape[2], key_shape[2], query_shape[3], dtype)
        picked = self._picks.get(seen)
        if picked is None:
            chosen = self.chosen(query_shape, key_shape, dtype)
            if chosen is None:
                return GEMM if query_shape[3] > WIDEST_HEAD else TORCH
            picked = self._picks[seen] = chosen
        return picked

    def chosen(self, query_shape: Shape, key_shape: Shape, dtype: torch.dtype) -> str | None:
        """What was measured to be the fastest for shapes of this class; None if nothing was."""
        value = self._choices.get(choice_name(query_shape, key_shape, dtype))
        # It may come from a store that anybody has written.
        name = value.get("backend") if isinstance(value, dict) else None
        return name if name in candidates(query_shape) else None

    def forget(self) -> None:
        """Ask for every choice again."""
        self._picks = {}

    def run(self, backend: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention by one of the implementations above, or by torch's next one where that cannot do it."""
        if backend == GEMM:
            return gemm_attention(query, key, value)
        if backend == TORCH or not can_be_first(backend):
            return functional.scaled_dot_product_attention(query, key, value)
        with self._switching, first(backend):
            return functional.scaled_dot_product_attention(query, key, value)

    def measure(self, query_shape: Shape, key_shape: Shape, dtype: torch.dtype, device: torch.device) -> str | None:
        """Time every implementation for shapes of this class, unless that was done, and choose; the choice.

        Takes some ten milliseconds and three times the memory of the attention itself, and draws no number from the
        user's generators. Any thread may call it; None on a CPU, while a graph is captured, and where nothing runs.
        Raises torch.cuda.OutOfMemoryError.
        """
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return None
        known = self.chosen(query_shape, key_shape, dtype)
        if known is not None:
            return known
        with torch.cuda.device(device):
            return self.time_all(query_shape, key_shape, dtype, device)

    def time_all(self, query_shape: Shape, key_shape: Shape, dtype: torch.dtype, device: torch.device) -> str | None:
        """measure() without its conditions."""
        with our_modes(device):
            inputs = random_inputs(query_shape, key_shape, dtype, device)
            # In float32 from the start, so that ours is judged as well.
            expected = gemm_attention(*(tensor.float() for tensor in inputs)).to(dtype)
            found = fastest(self._works(inputs), expected, self._time_ms)
        if found is None:
            return None
        self._choices.set(choice_name(query_shape, key_shape, dtype), found)
        return found["backend"]

    def _works(self, inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, Callable[[], Tensor]]:
        query, key, _ = inputs
        scores_bytes = query.shape[:3].numel() * key.shape[2] * 4
        names = [name for name in candidates(query.shape) if name != MATH or scores_bytes <= MATH_SCORES_BYTES]
        works: dict[str, Callable[[], Tensor]] = {
            name: partial(self._alone, name, inputs) for name in names if name in BACKENDS and can_be_first(name)
        }
        works[GEMM] = partial(gemm_attention, *inputs)
        if TORCH in names:
            works[TORCH] = partial(functional.scaled_dot_product_attention, *inputs)
        return works

    def _alone(self, backend: str, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        # Raises where this one cannot do it, instead of timing another.
        with self._switching, switched_off(tuple(other for other in BACKENDS if other != backend)):
            return functional.scaled_dot_product_attention(*inputs)


def candidates(query_shape: Shape) -> tuple[str, ...]:
    """What may serve a shape; the switches of torch may still forbid one."""
    if query_shape[3] > WIDEST_HEAD:
        return (GEMM, EFFICIENT)
    return (TORCH, CUDNN, FLASH, EFFICIENT, MATH, GEMM)


def choice_name(query_shape: Shape, key_shape: Shape, dtype: torch.dtype) -> str:
    """The name of a class of shapes: head width, dtype, and the next powers of two of the token counts."""
    queries, keys = (1 << (shape[2] - 1).bit_length() for shape in (query_shape, key_shape))
    dtype_name = str(dtype).removeprefix("torch.")
    return f"attention, {dtype_name}, width {query_shape[3]}, {queries} queries, {max(keys, FEW_KEYS)} keys"


def is_on(backend: str) -> bool:
    """Whether torch may use an implementation: a host can switch one off."""
    return getattr(switches, f"{SWITCHES[backend]}_sdp_enabled", lambda: False)()


def can_be_first(backend: str) -> bool:
    """Whether first() can do it for an implementation, and may."""
    return is_on(backend) and (backend != CUDNN or TAKES_PRIORITY)


def first(backend: str) -> contextlib.AbstractContextManager[Any]:
    """Give an implementation the first place, and leave torch the others for what that one cannot do."""
    if backend != CUDNN:
        return switched_off(AHEAD[backend])
    allowed = [getattr(SDPBackend, BACKENDS[name]) for name in BACKENDS if name == CUDNN or is_on(name)]
    return sdpa_kernel(allowed, set_priority=True)


@contextlib.contextmanager
def switched_off(backends: tuple[str, ...]) -> Iterator[None]:
    # sdpa_kernel does the same at ten times the cost, which every launch would pay.
    found_on = [backend for backend in backends if is_on(backend)]
    for backend in found_on:
        getattr(switches, f"enable_{SWITCHES[backend]}_sdp")(False)
    try:
        yield
    finally:
        for backend in found_on:
            getattr(switches, f"enable_{SWITCHES[backend]}_sdp")(True)


def gemm_attention(query: Tensor, key: Tensor, value: Tensor, scores_bytes: int = SCORES_BYTES) -> Tensor:
    """Exact attention from two GEMMs and a softmax, for heads of any width, with scores in float32.

    No more scores than scores_bytes are held at once (those of one query at least), and their softmax beside them.
    """
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    query, key, value = (tensor.flatten(0, 1) for tensor in (query, key, value))
    rows = min(queries, max(1, scores_bytes // (4 * batch * heads * keys)))
    scores = query.new_empty((batch * heads, rows, keys), dtype=torch.float32)
    # Heads lie beside each other in memory, as whoever joins them wants it.
    output = query.new_empty((batch, queries, heads, value.shape[2])).transpose(1, 2)
    for start in range(0, queries, rows):
        some = query[:, start:start + rows]
        weights = score(some, key, width**-0.5, scores[:, :some.shape[1]]).softmax(-1).to(value.dtype)
        output[:, :, start:start + rows] = torch.bmm(weights, value).unflatten(0, (batch, heads))
    return output


def sums_in_half() -> bool:
    """Whether products of float16 are summed in float16: then torch has none with an output in float32."""
    return bool(switch_of(switches.matmul, "allow_fp16_accumulation"))


def score(query: Tensor, key: Tensor, scale: float, scores: Tensor) -> Tensor:
    """scale * query @ key^T, summed and kept in float32: in half precision a large score would be far off, or
    infinite."""
    if query.device.type == "cuda" and query.dtype != torch.float32 and GEMM_WIDENS and not sums_in_half():
        return torch.baddbmm(
            scores, query, key.transpose(1, 2), out_dtype=torch.float32, beta=0, alpha=scale, out=scores
        )
    return torch.baddbmm(scores, query.float(), key.float().transpose(1, 2), beta=0, alpha=scale, out=scores)

"""Attention by the implementation that was measured to be the fastest on this GPU."""
from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.backends import cuda as switches

from ...core.card import current_card, named
from ...core.precision import our_modes, switch_of
from ...core.tuning_cache import TuningCache
from .attention_tuning import Shape, TimeMs, fastest, random_inputs, time_on_gpu

log = logging.getLogger("onediff")

# torch: what torch picks by itself. gemm: ours, below.
TORCH, CUDNN, FLASH, EFFICIENT, MATH, GEMM = "torch", "cudnn", "flash", "efficient", "math", "gemm"
# What torch chooses from. Each is called by itself: torch's switches are the whole process's, and a host's thread would
# see them flipped.
FUSED = {
    CUDNN: "_scaled_dot_product_cudnn_attention", FLASH: "_scaled_dot_product_flash_attention",
    EFFICIENT: "_scaled_dot_product_efficient_attention", MATH: "_scaled_dot_product_attention_math",
}
# What they are given after query, key and value: no mask, and nothing kept for gradients.
GIVEN: dict[str, tuple[Any, ...]] = {CUDNN: (None, False), FLASH: (), EFFICIENT: (None, False), MATH: ()}
# The switches as torch.backends.cuda calls it: name_sdp_enabled().
SWITCHES = {CUDNN: "cudnn", FLASH: "flash", EFFICIENT: "mem_efficient", MATH: "math"}
# Before torch 2.5, cuDNN's took other arguments, where it was there at all.
HAS_CUDNN = hasattr(torch, FUSED[CUDNN]) and "attn_bias" in str(getattr(torch.ops.aten, FUSED[CUDNN]).default._schema)
# torch 2.8 and newer, on an NVIDIA GPU: a GEMM of half precision tensors into float32.
GEMM_WIDENS = "dtype_out" in torch.ops.aten.baddbmm.overloads() and torch.version.hip is None
# No kernel but "efficient" takes wider heads; torch's last resort holds all scores at once, 4 GiB for 1024x1024 pixels.
WIDEST_HEAD = 256
FEW_KEYS = 256
# torch itself pads other heads.
FLASH_WIDTHS = 8
SCORES_BYTES = 64 << 20
# A class of shapes spans a factor of four in scores, and any batch.
MATH_SCORES_BYTES = 4 << 20


class Attention:
    """Softmax attention over (batch, heads, tokens, width), as torch's scaled_dot_product_attention.

    Picks by what measure() has found for shapes of the same class, and leaves the pick to torch where nothing was
    measured. On a CPU it is always torch's.
    """

    def __init__(self, tuning_cache: TuningCache, time_ms: TimeMs = time_on_gpu) -> None:
        self._tuning_cache = tuning_cache
        self._time_ms = time_ms
        self._picks: dict[tuple[int, int, int, torch.dtype, int], str] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, upcast: bool = False) -> Tensor:
        """The mix of values, in query's dtype and shape. upcast: computed in float32."""
        if upcast and query.dtype != torch.float32:
            return self(query.float(), key.float(), value.float()).to(query.dtype)
        if query.device.type != "cuda":
            return functional.scaled_dot_product_attention(query, key, value)
        return self.run(self.pick(query.shape, key.shape, query.dtype), query, key, value)

    def pick(self, query_shape: Shape, key_shape: Shape, dtype: torch.dtype) -> str:
        """Which implementation serves these shapes on the GPU that computes."""
        seen = (query_shape[2], key_shape[2], query_shape[3], dtype, current_card())
        picked = self._picks.get(seen)
        if picked is None:
            chosen = self.chosen(query_shape, key_shape, dtype)
            if chosen is None:
                return GEMM if query_shape[3] > WIDEST_HEAD else TORCH
            picked = self._picks[seen] = chosen
        return picked

    def chosen(self, query_shape: Shape, key_shape: Shape, dtype: torch.dtype) -> str | None:
        """What was measured to be the fastest for shapes of this class; None if nothing was."""
        value = self._tuning_cache.get(choice_name(query_shape, key_shape, dtype))
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
        if backend != TORCH and may_use(backend):
            try:
                return alone(backend, query, key, value)
            except torch.cuda.OutOfMemoryError:
                raise
            except RuntimeError:
                # Shapes of one class may differ in what an implementation wants of them.
                log.debug("attention by %s cannot do %s", backend, tuple(query.shape), exc_info=True)
        return functional.scaled_dot_product_attention(query, key, value)

    def measure(self, query_shape: Shape, key_shape: Shape, dtype: torch.dtype, device: torch.device) -> str | None:
        """Time every implementation for shapes of this class, unless that was done, and choose; the choice.

        Takes some ten milliseconds and three times the memory of the attention itself, and draws no number from the
        user's generators. Any thread may call it; None on a CPU, while a graph is captured, and where nothing runs.
        Raises torch.cuda.OutOfMemoryError.
        """
        if device.type != "cuda":
            return None
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                return None
            return self.chosen(query_shape, key_shape, dtype) or self.time_all(query_shape, key_shape, dtype, device)

    def time_all(self, query_shape: Shape, key_shape: Shape, dtype: torch.dtype, device: torch.device) -> str | None:
        """measure() without its conditions."""
        with our_modes(device):
            inputs = random_inputs(query_shape, key_shape, dtype, device)
            # In float32 from the start, so that ours is judged as well.
            query, key, value = inputs
            expected = gemm_attention(query.float(), key.float(), value.float()).to(dtype)
            found = fastest(self._works(inputs), expected, self._time_ms)
        if found is None:
            return None
        self._tuning_cache.set(choice_name(query_shape, key_shape, dtype), found)
        best: str = found["backend"]
        return best

    def _works(self, inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, Callable[[], Tensor]]:
        query, key, _ = inputs
        scores_bytes = query.shape[:3].numel() * key.shape[2] * 4
        names = [name for name in candidates(query.shape) if name != MATH or scores_bytes <= MATH_SCORES_BYTES]
        works: dict[str, Callable[[], Tensor]] = {
            name: partial(alone, name, *inputs) for name in names if name in FUSED and may_use(name)
        }
        works[GEMM] = partial(gemm_attention, *inputs)
        if TORCH in names:
            works[TORCH] = partial(functional.scaled_dot_product_attention, *inputs)
        return works


def candidates(query_shape: Shape) -> tuple[str, ...]:
    """What may serve a shape; the switches of torch may still forbid one."""
    if query_shape[3] > WIDEST_HEAD:
        return (GEMM, EFFICIENT)
    return (TORCH, CUDNN, FLASH, EFFICIENT, MATH, GEMM)


def choice_name(query_shape: Shape, key_shape: Shape, dtype: torch.dtype) -> str:
    """The name of a class of shapes on the card that computes: head width, dtype, and the next powers of two of the
    token counts."""
    queries, keys = (1 << (shape[2] - 1).bit_length() for shape in (query_shape, key_shape))
    dtype_name = str(dtype).removeprefix("torch.")
    return named(f"attention, {dtype_name}, width {query_shape[3]}, {queries} queries, {max(keys, FEW_KEYS)} keys")


def may_use(backend: str) -> bool:
    """Whether this torch has an implementation, and the host has not switched it off."""
    if backend == CUDNN and not HAS_CUDNN:
        return False
    return getattr(switches, f"{SWITCHES[backend]}_sdp_enabled", lambda: False)()


def alone(backend: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention by one of torch's implementations and no other. Raises RuntimeError where it cannot do that."""
    if backend == FLASH and query.shape[-1] % FLASH_WIDTHS:
        raise RuntimeError(f"flash attention takes heads whose width is a multiple of {FLASH_WIDTHS}")
    output: Tensor = getattr(torch, FUSED[backend])(query, key, value, *GIVEN[backend])[0]
    return output


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

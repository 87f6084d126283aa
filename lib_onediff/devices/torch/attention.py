"""Attention by the implementation that was measured to be the fastest on this GPU."""
from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda as switches

from ...core.device import TimeMs
from ...core.precision import our_modes, switch_of
from ..cuda.kernels.launch_config import Kernel, Launches, Trial, random_on, tuned
from .operators import HAS_GQA, repeated, scaled_dot_product_attention

log = logging.getLogger("onediff")

# torch: what torch picks by itself. gemm: ours, below.
TORCH = "torch"
CUDNN = "cudnn"
FLASH = "flash"
EFFICIENT = "efficient"
MATH = "math"
GEMM = "gemm"
# The implementations that torch chooses from. Each is called directly: torch's switches hold for the whole process, and
# a host's thread would see them change.
FUSED = {
    CUDNN: "_scaled_dot_product_cudnn_attention", FLASH: "_scaled_dot_product_flash_attention",
    EFFICIENT: "_scaled_dot_product_efficient_attention", MATH: "_scaled_dot_product_attention_math",
}
# Their arguments after query, key and value: no mask, and nothing kept for gradients.
GIVEN: dict[str, tuple[Any, ...]] = {CUDNN: (None, False), FLASH: (), EFFICIENT: (None, False), MATH: ()}
# Those that take fewer heads of keys than of queries as they are, from the torch on that has it.
SHARE_KEY_HEADS = {CUDNN, FLASH}
# The switches as torch.backends.cuda calls it: name_sdp_enabled().
SWITCHES = {CUDNN: "cudnn", FLASH: "flash", EFFICIENT: "mem_efficient", MATH: "math"}
# Before torch 2.5, cuDNN's took other arguments or did not exist.
HAS_CUDNN = hasattr(torch, FUSED[CUDNN]) and "attn_bias" in str(getattr(torch.ops.aten, FUSED[CUDNN]).default._schema)
# torch 2.8 and newer, on an NVIDIA GPU: a GEMM of half precision tensors into float32.
GEMM_WIDENS = "dtype_out" in torch.ops.aten.baddbmm.overloads() and torch.version.hip is None
# No kernel but "efficient" takes wider heads; torch's last resort holds all scores at once, 4 GiB for 1024x1024 pixels.
WIDEST_HEAD = 256
FEW_KEYS = 256
# torch itself pads other heads.
FLASH_WIDTHS = 8
SCORES_BYTES = 64 << 20
MATH_SCORES_BYTES = 4 << 20
# The candidates; the first is used where nothing was measured.
NARROW = Kernel("attention", tuple((name,) for name in (TORCH, CUDNN, FLASH, EFFICIENT, MATH, GEMM)))
WIDE = Kernel("attention", ((GEMM,), (EFFICIENT,)))
# Largest difference between two exact implementations at random inputs, relative to the output's norm; a wrong one
# differs by about 1.
WORST_ERROR = {torch.float16: 1e-2, torch.bfloat16: 2e-2, torch.float32: 2e-3}
Shape = tuple[int, ...]


class Attention:
    """Softmax attention over (batch, heads, tokens, width), as torch's scaled_dot_product_attention.

    Uses the implementation that measure() found to be the fastest for shapes of the same class, and torch's own choice
    where nothing was measured, on a CPU, and with a mask.
    """

    def __init__(self, launches: Launches) -> None:
        self._launches = launches

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, upcast: bool = False, mask: Tensor | None = None
    ) -> Tensor:
        """The mix of values, in query's dtype and shape. See Operators.attention."""
        if upcast and query.dtype != torch.float32:
            return self(query.float(), key.float(), value.float(), mask=mask).to(query.dtype)
        if query.device.type != "cuda" or mask is not None:
            return scaled_dot_product_attention(query, key, value, mask)
        try:
            return attend(self.pick(query.shape, key.shape, query.dtype), query, key, value)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError:
            # An implementation may take some shapes of a class and refuse others.
            log.debug("attention cannot do %s as it was chosen", tuple(query.shape), exc_info=True)
            return scaled_dot_product_attention(query, key, value)

    def pick(self, query_shape: Shape, key_shape: Shape, dtype: torch.dtype) -> str:
        """The name of the implementation for these shapes on the current GPU."""
        [picked] = self._launches.of(kernel_of(query_shape), class_of(query_shape, key_shape), dtype)
        return str(picked)

    def measure(
        self, query_shape: Shape, key_shape: Shape, dtype: torch.dtype, device: torch.device, time_ms: TimeMs
    ) -> bool:
        """Time every implementation for shapes of this class and choose the fastest. Returns False, and does nothing,
        if this was done before.

        Takes some ten milliseconds and three times the memory of the attention itself, and draws no number from the
        user's generators. Raises torch.cuda.OutOfMemoryError.
        """
        kernel = kernel_of(query_shape)
        shape_class = class_of(query_shape, key_shape)
        if self._launches.chosen(kernel, shape_class, dtype) is not None:
            return False
        # torch warns of the reasons why an implementation cannot be used: no user needs them.
        with our_modes(device), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            query, key, value = inputs_of(random_on(device, dtype), query_shape, key_shape)
            # In float32 from the start, so that our own implementation is checked too.
            expected = attend(GEMM, query.float(), key.float(), value.float())

            def agrees(output: Tensor) -> bool:
                # False for a NaN, too.
                return float((output.float() - expected).norm() / expected.norm()) <= WORST_ERROR[dtype]

            trial = Trial(kernel, shape_class, lambda config: attend(config[0], query, key, value), agrees)
            return tuned(self._launches, trial, dtype, time_ms)


def kernel_of(query_shape: Shape) -> Kernel:
    """The implementations that may serve a shape; torch's switches may still forbid one."""
    return WIDE if query_shape[3] > WIDEST_HEAD else NARROW


def class_of(query_shape: Shape, key_shape: Shape) -> str:
    """The class of shapes: head width, the next powers of two of the token counts, and how many heads of queries share
    a head of keys, if several do."""
    queries, keys = (1 << (shape[2] - 1).bit_length() for shape in (query_shape, key_shape))
    name = f"width {query_shape[3]}, {queries} queries, {max(keys, FEW_KEYS)} keys"
    shared_by = query_shape[1] // key_shape[1]
    return name if shared_by == 1 else f"{name}, {shared_by} heads to one"


def attend(name: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention by one of the implementations. Raises RuntimeError if it cannot compute this, or if the host has
    switched it off."""
    if name == TORCH:
        return scaled_dot_product_attention(query, key, value)
    if key.shape[1] != query.shape[1] and not (HAS_GQA and name in SHARE_KEY_HEADS):
        key = repeated(key, query.shape[1])
        value = repeated(value, query.shape[1])
    if name == GEMM:
        return gemm_attention(query, key, value)
    if not may_use(name):
        raise RuntimeError(f"{name} is not there, or switched off")
    if name == MATH and query.shape[:3].numel() * key.shape[2] * 4 > MATH_SCORES_BYTES:
        raise RuntimeError("all scores at once are too many")
    if name == FLASH and query.shape[-1] % FLASH_WIDTHS:
        raise RuntimeError(f"flash attention takes heads whose width is a multiple of {FLASH_WIDTHS}")
    output: Tensor = getattr(torch, FUSED[name])(query, key, value, *GIVEN[name])[0]
    return output


def may_use(backend: str) -> bool:
    """Whether this torch has the implementation and the host has not switched it off."""
    if backend == CUDNN and not HAS_CUDNN:
        return False
    return getattr(switches, f"{SWITCHES[backend]}_sdp_enabled", lambda: False)()


def gemm_attention(query: Tensor, key: Tensor, value: Tensor, scores_bytes: int = SCORES_BYTES) -> Tensor:
    """Exact attention from two GEMMs and a softmax, for heads of any width, with scores in float32.

    No more scores than scores_bytes are held at once (those of one query at least), and their softmax beside them.
    """
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    query, key, value = (tensor.flatten(0, 1) for tensor in (query, key, value))
    rows = min(queries, max(1, scores_bytes // (4 * batch * heads * keys)))
    scores = query.new_empty((batch * heads, rows, keys), dtype=torch.float32)
    # Heads lie beside each other in memory, so that joining them is a view.
    output = query.new_empty((batch, queries, heads, value.shape[2])).transpose(1, 2)
    for start in range(0, queries, rows):
        some = query[:, start:start + rows]
        weights = score(some, key, width**-0.5, scores[:, :some.shape[1]]).softmax(-1).to(value.dtype)
        output[:, :, start:start + rows] = torch.bmm(weights, value).unflatten(0, (batch, heads))
    return output


def sums_in_half() -> bool:
    """Whether torch sums products of float16 in float16: then it has none with an output in float32."""
    return bool(switch_of(switches.matmul, "allow_fp16_accumulation"))


def score(query: Tensor, key: Tensor, scale: float, scores: Tensor) -> Tensor:
    """scale * query @ key^T, summed and kept in float32: in half precision a large score would be far off, or
    infinite."""
    if query.device.type == "cuda" and query.dtype != torch.float32 and GEMM_WIDENS and not sums_in_half():
        return torch.baddbmm(
            scores, query, key.transpose(1, 2), out_dtype=torch.float32, beta=0, alpha=scale, out=scores
        )
    return torch.baddbmm(scores, query.float(), key.float().transpose(1, 2), beta=0, alpha=scale, out=scores)


def inputs_of(make: Callable[..., Tensor], query_shape: Shape, key_shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of these shapes (batch, heads, tokens, width), in memory as our forward has them: parts of
    the output of one GEMM, (batch, tokens, heads * width) each. make: makes a tensor of a shape."""
    batch, heads, queries, width = query_shape
    key_heads, keys = key_shape[1:3]

    def split(tokens: int, heads: int, parts: int) -> list[Tensor]:
        fused = make(batch, tokens, parts * heads * width)
        return [part.unflatten(-1, (heads, width)).transpose(1, 2) for part in fused.chunk(parts, dim=-1)]

    if key_shape == query_shape:
        query, key, value = split(keys, heads, 3)
    else:
        [query] = split(queries, heads, 1)
        key, value = split(keys, key_heads, 2)
    return query, key, value

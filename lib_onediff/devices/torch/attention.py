"""Attention by the implementation that was measured as the fastest on this GPU."""
from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda as switches

from ...core.device import TimeMs
from ...core.operators import Filled
from ...core.precision import our_modes, switch_of
from ..cuda.kernels.launch_config import Kernel, LaunchConfig, Launches, Trial, random_on, tuned
from .operators import HAS_GQA, repeated, scaled_dot_product_attention

log = logging.getLogger("onediff")

# The implementations. TORCH: torch's own choice. GEMM: gemm_attention below. PARTS: attention_in_parts below. The
# others: torch's kernels.
TORCH = "torch"
CUDNN = "cudnn"
FLASH = "flash"
EFFICIENT = "efficient"
MATH = "math"
GEMM = "gemm"
PARTS = "parts"
# The functions of torch's kernels, which are called directly: torch's switches for the choice are global, and other
# threads of the host would see them change.
FUSED = {
    CUDNN: "_scaled_dot_product_cudnn_attention", FLASH: "_scaled_dot_product_flash_attention",
    EFFICIENT: "_scaled_dot_product_efficient_attention", MATH: "_scaled_dot_product_attention_math",
}
# The arguments of these functions after query, key and value: no mask, and no log-sum-exp for gradients.
GIVEN: dict[str, tuple[Any, ...]] = {CUDNN: (None, False), FLASH: (), EFFICIENT: (None, False), MATH: ()}
# The kernels that support fewer heads of keys than of queries, if torch does (HAS_GQA).
SHARE_KEY_HEADS = {CUDNN, FLASH}


def takes(function: str, argument: str) -> bool:
    """Whether torch.ops.aten has this function, with this argument."""
    operator = getattr(torch.ops.aten, function, None)
    return operator is not None and f" {argument}" in str(operator.default._schema)


# Before torch 2.5, cuDNN's function had other arguments or did not exist.
HAS_CUDNN = takes(FUSED[CUDNN], "attn_bias")
# Whether torch keeps the plans that cuDNN builds for sequences of different lengths: since the release that added this
# argument. An older torch builds a plan at each call, which takes some 40 ms on the CPU, and frees it afterwards, even
# if a captured graph uses it.
KEEPS_CUDNN_SEQUENCES = takes("_cudnn_attention_forward", "seqused_k")
# torch.backends.cuda has a function NAME_sdp_enabled for each of these names.
SWITCHES = {CUDNN: "cudnn", FLASH: "flash", EFFICIENT: "mem_efficient", MATH: "math"}
# Whether torch has a GEMM of float16 or bfloat16 with a float32 output: torch 2.8 and newer, on NVIDIA GPUs.
GEMM_WIDENS = "dtype_out" in torch.ops.aten.baddbmm.overloads() and torch.version.hip is None
# The widest heads of NARROW. Of torch's kernels, only EFFICIENT supports wider ones; MATH would store all scores: 4 GiB
# at 1024x1024 pixels.
WIDEST_HEAD = 256
# Fewer keys than this count as this many in class_of. Our own kernel for cross-attentions computes at most this many.
FEW_KEYS = 256
# FLASH needs heads whose width is a multiple of this; torch itself would pad them.
FLASH_WIDTHS = 8
# The largest number of bytes of scores that gemm_attention computes at once.
SCORES_BYTES = 64 << 20
# The largest number of bytes of scores for which MATH is a candidate.
MATH_SCORES_BYTES = 4 << 20
# The candidates for heads up to WIDEST_HEAD, and for wider ones. The first one is used without a measurement.
NARROW = Kernel("attention", tuple((name,) for name in (TORCH, CUDNN, FLASH, EFFICIENT, MATH, GEMM)))
WIDE = Kernel("attention", ((GEMM,), (EFFICIENT,)))
# The candidates for rows of tokens that are filled up to one length (core.operators.Filled). TORCH uses a mask of keys.
FILLED = Kernel("attention of filled rows", ((TORCH,), (CUDNN,), (FLASH,), (PARTS,)))
# How many tokens of each row are padding when the candidates of FILLED are measured.
NOT_USED = 9
# EFFICIENT needs rows of a bias that begin at multiples of this many numbers.
BIAS_ALIGNED = 8
# The largest relative difference between two correct implementations at random inputs. A wrong one differs by about 1.
WORST_ERROR = {torch.float16: 1e-2, torch.bfloat16: 2e-2, torch.float32: 2e-3}
# The dtypes of attention over filled rows without a mask of keys.
HALF_TYPES = (torch.float16, torch.bfloat16)
Shape = tuple[int, ...]


class Attention:
    """Softmax attention over (batch, heads, tokens, width), as torch's scaled_dot_product_attention.

    Uses the implementation that measure() has found to be the fastest for shapes of the same class. Without a
    measurement, it uses torch's own choice, or GEMM for heads wider than WIDEST_HEAD. On a CPU, or with a mask that is
    a tensor, it always uses torch's own choice.

    launches: has the measurements.
    """

    def __init__(self, launches: Launches) -> None:
        self._launches = launches

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, upcast: bool = False, mask: Tensor | Filled | None = None
    ) -> Tensor:
        """The output, in query's dtype and shape. If the chosen implementation does not support the inputs, torch's own
        choice is used. upcast, mask: see Operators.attention. Raises torch.cuda.OutOfMemoryError."""
        if upcast and query.dtype != torch.float32:
            return self(query.float(), key.float(), value.float(), mask=mask).to(query.dtype)
        if query.device.type != "cuda" or isinstance(mask, Tensor):
            return scaled_dot_product_attention(query, key, value, mask)
        uncertain = 0 if mask is None else key.shape[2] - mask.certain
        name = self.pick(query.shape, key.shape, query.dtype, uncertain)
        try:
            if mask is None or not uncertain:
                return attend(name, query, key, value)
            return attend_filled(name, query, key, value, mask)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError:
            # The chosen implementation may not support all shapes of the class.
            log.debug("the chosen attention does not support %s", tuple(query.shape), exc_info=True)
            return scaled_dot_product_attention(query, key, value, mask)

    def pick(self, query_shape: Shape, key_shape: Shape, dtype: torch.dtype, uncertain: int = 0) -> str:
        """The name of the implementation to use for queries and keys of these shapes (batch, heads, tokens, width) on
        the current GPU: TORCH, CUDNN and so on. Without a measurement, the first candidate of NARROW, WIDE or FILLED.
        uncertain: see core.family.AttentionShapes."""
        kernel = FILLED if uncertain else kernel_of(query_shape)
        [picked] = self._launches.of(kernel, class_of(query_shape, key_shape, uncertain), dtype)
        return str(picked)

    def measure(
        self, query_shape: Shape, key_shape: Shape, dtype: torch.dtype, device: torch.device, time_ms: TimeMs,
        uncertain: int = 0,
    ) -> bool:
        """Time every implementation for shapes of this class, store the fastest correct one as the choice, and return
        True. If there is a choice for this GPU model, do nothing and return False. query_shape, key_shape, dtype,
        uncertain: see pick.

        Takes tens of milliseconds and three times the memory of the attention itself. Does not change the user's random
        generators. Raises torch.cuda.OutOfMemoryError, and what the first candidate raises.
        """
        kernel = FILLED if uncertain else kernel_of(query_shape)
        shape_class = class_of(query_shape, key_shape, uncertain)
        if self._launches.chosen(kernel, shape_class, dtype) is not None:
            return False
        # torch warns why an implementation cannot be used; these warnings are of no use to users.
        with our_modes(device), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            query, key, value = inputs_of(random_on(device, dtype), query_shape, key_shape)
            if uncertain:
                trial = filled_trial(shape_class, query, key, value, uncertain)
                return tuned(self._launches, trial, dtype, time_ms)
            # Computed in float32, so that the same implementation in half precision is checked too.
            expected = attend(GEMM, query.float(), key.float(), value.float())

            def agrees(output: Tensor) -> bool:
                # Also False for NaN.
                return float((output.float() - expected).norm() / expected.norm()) <= WORST_ERROR[dtype]

            trial = Trial(kernel, shape_class, lambda config: attend(config[0], query, key, value), agrees)
            return tuned(self._launches, trial, dtype, time_ms)


def kernel_of(query_shape: Shape) -> Kernel:
    """The implementations to measure for queries of this shape (batch, heads, tokens, width): NARROW or WIDE, by the
    head width. Some may be missing on this machine: see may_use."""
    return WIDE if query_shape[3] > WIDEST_HEAD else NARROW


def class_of(query_shape: Shape, key_shape: Shape, uncertain: int = 0) -> str:
    """The name of the class of shapes within which one implementation is used. It consists of the head width; the
    numbers of queries and of keys, rounded up to powers of two, for keys at least FEW_KEYS; how many heads of queries
    share a head of keys; and uncertain (see core.family.AttentionShapes), rounded up to a power of two."""
    queries = power_of_two(query_shape[2])
    keys = power_of_two(key_shape[2])
    name = f"width {query_shape[3]}, {queries} queries, {max(keys, FEW_KEYS)} keys"
    shared_by = query_shape[1] // key_shape[1]
    if shared_by > 1:
        name = f"{name}, {shared_by} heads to one"
    if not uncertain:
        return name
    last = "all" if uncertain == key_shape[2] else str(power_of_two(uncertain))
    return f"{name}, {last} uncertain"


def power_of_two(number: int) -> int:
    """number, at least 1, rounded up to a power of two."""
    return 1 << (number - 1).bit_length()


def attend(name: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax attention over (batch, heads, tokens, width) by the implementation of this name, such as FLASH. Keys may
    have fewer heads than queries. Raises RuntimeError if the implementation does not support the inputs, is missing in
    this torch, or was switched off in torch by the host, and for MATH if the scores would take more than
    MATH_SCORES_BYTES."""
    if name == TORCH:
        return scaled_dot_product_attention(query, key, value)
    if key.shape[1] != query.shape[1] and not (HAS_GQA and name in SHARE_KEY_HEADS):
        key = repeated(key, query.shape[1])
        value = repeated(value, query.shape[1])
    if name == GEMM:
        return gemm_attention(query, key, value)
    if not may_use(name):
        raise RuntimeError(f"{name} is missing, or switched off")
    if name == MATH and query.shape[:3].numel() * key.shape[2] * 4 > MATH_SCORES_BYTES:
        raise RuntimeError("the scores would take too much memory")
    if name == FLASH and query.shape[-1] % FLASH_WIDTHS:
        raise RuntimeError(f"flash attention takes heads whose width is a multiple of {FLASH_WIDTHS}")
    output: Tensor = getattr(torch, FUSED[name])(query, key, value, *GIVEN[name])[0]
    return output


def attend_filled(name: str, query: Tensor, key: Tensor, value: Tensor, filled: Filled) -> Tensor:
    """Attention of rows that are filled up to one length (Filled), by the implementation of this name: TORCH, CUDNN,
    FLASH or PARTS. Raises RuntimeError as attend, and for all but TORCH if query is not in half precision.

    The kernels for sequences of different lengths (varlen) get two sequences for each row: the tokens that are used,
    and the padding. So no token attends to padding, and the shapes do not depend on the lengths.
    """
    if name == TORCH:
        return scaled_dot_product_attention(query, key, value, filled)
    if query.dtype not in HALF_TYPES:
        raise RuntimeError(f"{name} computes no {query.dtype}")
    if name == PARTS:
        return attention_in_parts(query, key, value, filled)
    if not may_use(name):
        raise RuntimeError(f"{name} is missing, or switched off")
    if name == CUDNN and not KEEPS_CUDNN_SEQUENCES:
        raise RuntimeError("this torch does not keep cuDNN's plans for sequences")
    batch, heads, tokens, _ = query.shape
    if key.shape[1] != heads and not HAS_GQA:
        key = repeated(key, heads)
        value = repeated(value, heads)
    queries, keys, values = (one.transpose(1, 2).flatten(0, 1) for one in (query, key, value))
    if name == CUDNN:
        # cuDNN needs contiguous heads.
        mixed = cudnn_of_sequences(queries.contiguous(), keys.contiguous(), values.contiguous(), filled.ends, tokens)
    else:
        mixed = flash_of_sequences(queries, keys, values, filled.ends, tokens)
    output: Tensor = mixed.unflatten(0, (batch, tokens)).transpose(1, 2)
    return output


def attention_in_parts(query: Tensor, key: Tensor, value: Tensor, filled: Filled) -> Tensor:
    """Attention of rows that are filled up to one length (Filled), joined from attention over two parts of the keys:
    over the first filled.certain ones, which are never padding, by CUDNN without a mask; and over the others, by
    EFFICIENT with a bias. Raises RuntimeError as attend, and if one of the two parts has no keys."""
    certain = filled.certain
    heads = query.shape[1]
    tokens = key.shape[2]
    if not 0 < certain < tokens:
        raise RuntimeError("all tokens are certain, or none is")
    sure_key = key[:, :, :certain]
    sure_value = value[:, :, :certain]
    if not HAS_GQA:
        sure_key = repeated(sure_key, heads)
        sure_value = repeated(sure_value, heads)
    sure = part_of(CUDNN, query, sure_key, sure_value)
    bias = bias_of(filled.mask(tokens)[..., certain:], query.dtype).expand(-1, heads, query.shape[2], -1)
    rest = part_of(EFFICIENT, query, repeated(key[:, :, certain:], heads), repeated(value[:, :, certain:], heads), bias)
    return merged(*sure, *rest)


def part_of(
    name: str, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the given keys, and the logarithm of the sum of their scores' exponentials (log-sum-exp), float32
    (batch, heads, queries). name: CUDNN or EFFICIENT. bias: added to the scores, (batch, heads, queries, keys). Raises
    as attend."""
    if not may_use(name):
        raise RuntimeError(f"{name} is missing, or switched off")
    mixed, sums = getattr(torch, FUSED[name])(query, key, value, bias, True)[:2]
    batch, heads, queries, _ = query.shape
    # cuDNN's sums have a fourth dimension, of size 1; EFFICIENT's are padded to a multiple of 32 queries.
    return mixed, sums.reshape(batch, heads, -1)[:, :, :queries]


def bias_of(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of keys as a bias of scores, (batch, 1, 1, keys) both: 0 for keys that are seen, otherwise a number whose
    exponential is 0. seen: bool. The rows of the result begin at multiples of BIAS_ALIGNED."""
    keys = seen.shape[-1]
    # Finite, also when a kernel multiplies it by log2(e): otherwise a row that sees none of these keys would be NaN.
    lowest = torch.finfo(dtype).min / 2
    room = torch.zeros((*seen.shape[:-1], keys + -keys % BIAS_ALIGNED), dtype=dtype, device=seen.device)
    return room[..., :keys].masked_fill_(~seen, lowest)


def merged(first: Tensor, first_sums: Tensor, second: Tensor, second_sums: Tensor) -> Tensor:
    """Attention over all keys, from attention over two parts of them and the sums of both: see part_of.

    The share of each part is computed in float32. Then it is rounded to the dtype of the parts, so that one kernel can
    join them; the error of that is no larger than that of rounding the output.
    """
    share = torch.sigmoid(second_sums - first_sums)
    return torch.lerp(first, second, share.to(first.dtype)[..., None])


def cudnn_of_sequences(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int) -> Tensor:
    """Attention within each of several sequences, which are concatenated: query, key and value are (tokens of all
    sequences, heads, width). ends: int32, the index of the first token of each sequence, and the number of all tokens.
    longest: the largest number of tokens that a sequence may have."""
    output: Tensor = torch.ops.aten._cudnn_attention_forward(
        query, key, value, None, ends, ends, longest, longest, False
    )[0]
    return output


def flash_of_sequences(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int) -> Tensor:
    """As cudnn_of_sequences, by flash attention."""
    output: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, ends, ends, longest, longest, 0.0, False, False
    )[0]
    return output


def filled_trial(shape_class: str, query: Tensor, key: Tensor, value: Tensor, uncertain: int) -> Trial:
    """The trial of attention of rows that are filled up (Filled), at these inputs. shape_class: see class_of.
    uncertain: see core.family.AttentionShapes. An implementation agrees if its output is correct both when all tokens
    are used and when NOT_USED tokens of each row (at most uncertain) are padding."""
    tokens = query.shape[2]
    counts = [tokens, max(1, tokens - min(NOT_USED, uncertain))]
    used = [torch.full((len(query),), count, dtype=torch.int64, device=query.device) for count in counts]
    every = [Filled.of(one, tokens, tokens - uncertain) for one in used]
    expected = [attend(GEMM, *(one[:, :, :count].float() for one in (query, key, value))) for count in counts]

    def run(config: LaunchConfig) -> tuple[str, Tensor]:
        return config[0], attend_filled(config[0], query, key, value, every[1])

    def agrees(made: tuple[str, Tensor]) -> bool:
        name, output = made
        outputs = attend_filled(name, query, key, value, every[0]), output
        for found, exact, count in zip(outputs, expected, counts, strict=True):
            # Also False for NaN.
            error = (found[:, :, :count].float() - exact).norm() / exact.norm()
            if not float(error) <= WORST_ERROR[query.dtype] or not found.isfinite().all():
                return False
        return True

    return Trial(FILLED, shape_class, run, agrees)


def may_use(backend: str) -> bool:
    """Whether this torch has the implementation of this name (backend), and the host has not switched it off in
    torch.backends.cuda."""
    if backend == CUDNN and not HAS_CUDNN:
        return False
    return getattr(switches, f"{SWITCHES[backend]}_sdp_enabled", lambda: False)()


def gemm_attention(query: Tensor, key: Tensor, value: Tensor, scores_bytes: int = SCORES_BYTES) -> Tensor:
    """Softmax attention over (batch, heads, tokens, width) by two GEMMs and a softmax, for heads of any width, with
    scores in float32. Keys must have as many heads as queries.

    Queries are processed in chunks whose scores take at most scores_bytes, but at least one query at a time. The
    softmax of a chunk takes as much memory again.
    """
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    query, key, value = (tensor.flatten(0, 1) for tensor in (query, key, value))
    rows = min(queries, max(1, scores_bytes // (4 * batch * heads * keys)))
    scores = query.new_empty((batch * heads, rows, keys), dtype=torch.float32)
    # In memory (batch, queries, heads, width), so that joining the heads is a view.
    output = query.new_empty((batch, queries, heads, value.shape[2])).transpose(1, 2)
    for start in range(0, queries, rows):
        some = query[:, start:start + rows]
        weights = score(some, key, width**-0.5, scores[:, :some.shape[1]]).softmax(-1).to(value.dtype)
        output[:, :, start:start + rows] = torch.bmm(weights, value).unflatten(0, (batch, heads))
    return output


def sums_in_half() -> bool:
    """Whether torch is set at the moment to sum float16 products in float16, which the settings may allow. While that
    is so, torch's GEMM has no float32 output."""
    return bool(switch_of(switches.matmul, "allow_fp16_accumulation"))


def score(query: Tensor, key: Tensor, scale: float, scores: Tensor) -> Tensor:
    """scale * query @ key^T, written to `scores`, float32 (batch * heads, queries, keys), and returned. query, key:
    (batch * heads, tokens, width). In half precision, large scores would be inexact or infinite."""
    if query.device.type == "cuda" and query.dtype != torch.float32 and GEMM_WIDENS and not sums_in_half():
        return torch.baddbmm(
            scores, query, key.transpose(1, 2), out_dtype=torch.float32, beta=0, alpha=scale, out=scores
        )
    return torch.baddbmm(scores, query.float(), key.float().transpose(1, 2), beta=0, alpha=scale, out=scores)


def inputs_of(make: Callable[..., Tensor], query_shape: Shape, key_shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value for queries and keys of these shapes (batch, heads, tokens, width), with the strides of our
    forward: slices of the output of a fused projection, (batch, tokens, parts * heads * width). If the shapes are
    equal, query, key and value share one projection, otherwise key and value share one. make: make(*shape) returns a
    tensor."""
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

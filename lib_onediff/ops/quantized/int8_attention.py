"""Self attention whose scores are products in int8, after SageAttention (Zhang et al. 2024, arXiv 2410.02367).

What all keys of a head have in common adds the same to each score of a query, and a softmax does not see that: their
mean is taken off, so that keys with an offset keep their digits. Queries and keys are rounded with one scale for the
tokens that a program holds at once; the softmax is in float32, and its weights meet the values in the values' type.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton.attention import DTYPES, LOG2_E, heads_lie_beside
from ..triton.launch_config import LaunchConfig, Launches, int8_attention_kernel
from .attention_gains import Attend, Choose, may_gain, shape_class
from .scaled_mm import SMALLEST_MAXIMUM

# A program of four warps holds so many numbers in its registers.
HELD = 16384
# int8's tensor cores take this many at once.
FEWEST_LANES = 32
# Partial sums that are read at once.
PARTS = 16


@triton.jit(do_not_specialize=["keys", "heads"])
def sum_keys(
    key, sums, keys, heads, key_batch, key_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """Sums (batch * heads, chunks, BLOCK) in float32 of CHUNK keys each, always in the same order."""
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    row = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    place = key + batch * key_batch + head * WIDTH + row.to(tl.int64) * key_row + lane
    numbers = tl.load(place, (row < keys) & (lane < WIDTH), 0.0).to(tl.float32)
    chunk = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(sums + chunk * BLOCK + tl.arange(0, BLOCK), tl.sum(numbers, 0))


@triton.jit
def round_block(
    source, source_row, tokens, mean, factor, values, scales, block, blocks,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, SMALLEST: tl.constexpr,
):
    """(source - mean) * factor of one block of tokens: values (batch * heads, blocks * TOKENS, BLOCK) in int8, and
    their scale, (batch * heads, blocks). Tokens that are not there are zeros. A NaN or an infinity makes the scale NaN.
    """
    row = block * TOKENS + tl.arange(0, TOKENS)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    valid = (row < tokens) & (lane < WIDTH)
    numbers = tl.load(source + row.to(tl.int64) * source_row + lane, valid, 0.0).to(tl.float32)
    numbers = tl.where(valid, (numbers - mean[None, :]) * factor, 0.0)
    # A maximum passes over a NaN, and int8 has none.
    strange = tl.sum(tl.sum(numbers * 0.0, 1), 0)
    scale = tl.maximum(tl.max(tl.max(tl.abs(numbers), 1), 0), SMALLEST) / 127.0 + strange
    place = tl.program_id(1).to(tl.int64) * blocks + block
    rounded = tl.floor(numbers / scale + 0.5).to(tl.int8)
    tl.store(values + place * TOKENS * BLOCK + tl.arange(0, TOKENS)[:, None] * BLOCK + lane, rounded)
    tl.store(scales + place, scale)


@triton.jit(do_not_specialize=["queries", "keys", "chunks", "heads"])
def round_tokens(
    query, key, sums, query_values, query_scales, key_values, key_scales, queries, keys, chunks, heads, scale,
    query_batch, query_row, key_batch, key_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, PARTS: tl.constexpr, SMALLEST: tl.constexpr,
):
    """Queries times scale, and keys without their mean: see round_block. One program for each block of either."""
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    block, query_blocks, key_blocks = tl.program_id(0), tl.cdiv(queries, QUERIES), tl.cdiv(keys, KEYS)
    if block < query_blocks:
        nothing = tl.zeros((BLOCK,), tl.float32)
        round_block(
            query + batch * query_batch + head * WIDTH, query_row, queries, nothing, scale, query_values, query_scales,
            block, query_blocks, WIDTH, BLOCK, QUERIES, SMALLEST,
        )
    else:
        total = tl.zeros((BLOCK,), tl.float32)
        of_head = sums + tl.program_id(1).to(tl.int64) * chunks * BLOCK
        for start in range(0, chunks, PARTS):
            part = start + tl.arange(0, PARTS)[:, None]
            total += tl.sum(tl.load(of_head + part * BLOCK + lane[None, :], part < chunks, 0.0), 0)
        round_block(
            key + batch * key_batch + head * WIDTH, key_row, keys, total / keys, 1.0, key_values, key_scales,
            block - query_blocks, key_blocks, WIDTH, BLOCK, KEYS, SMALLEST,
        )


@triton.jit
def attend_keys(
    asked, scale, key_values, value, value_row, left, highest, total, mixed,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, LAST: tl.constexpr,
):
    """The softmax's highest score, its total and the mix of values, with one more block of keys. LAST: only as many as
    are left are there."""
    across, lane = tl.arange(0, KEYS), tl.arange(0, BLOCK)
    compared = tl.load(key_values + across[None, :] * BLOCK + lane[:, None])
    sums = tl.dot(asked, compared, out_dtype=tl.int32).to(tl.float32)
    if LAST:
        sums = tl.where(across[None, :] < left, sums, float("-inf"))
    # The largest before it is scaled: then one instruction scales the others and takes it off.
    higher = tl.maximum(highest, tl.max(sums, 1) * scale)
    weights = tl.exp2(sums * scale - higher[:, None])
    fading = tl.exp2(highest - higher)
    total = total * fading + tl.sum(weights, 1)
    place = value + across[:, None] * value_row + lane[None, :]
    if LAST:
        values = tl.load(place, (across[:, None] < left) & (lane[None, :] < WIDTH), 0.0)
    elif WIDTH < BLOCK:
        values = tl.load(place, lane[None, :] < WIDTH, 0.0)
    else:
        values = tl.load(place)
    return higher, total, tl.dot(weights.to(values.dtype), values, mixed * fading[:, None])


@triton.jit(do_not_specialize=["queries", "keys", "heads"])
def attend(
    query_values, query_scales, key_values, key_scales, value, output, queries, keys, heads, value_batch, value_row,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):
    """output (batch, queries, heads, WIDTH), of what round_tokens has made and of value as it is."""
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    of_head, lane = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK)[None, :]
    local = tl.arange(0, QUERIES)[:, None]
    query_block = of_head * tl.num_programs(0) + tl.program_id(0)
    asked = tl.load(query_values + query_block * (QUERIES * BLOCK) + (local * BLOCK + lane))
    asked_scale = tl.load(query_scales + query_block)
    whole, key_blocks = keys // KEYS, tl.cdiv(keys, KEYS)
    key_values += of_head * key_blocks * (KEYS * BLOCK)
    key_scales += of_head * key_blocks
    value += batch * value_batch + head * WIDTH
    highest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, BLOCK), tl.float32)
    for block in range(0, whole):
        highest, total, mixed = attend_keys(
            asked, asked_scale * tl.load(key_scales + block), key_values, value, value_row, KEYS, highest, total, mixed,
            WIDTH, BLOCK, KEYS, False,
        )
        key_values += KEYS * BLOCK
        value += KEYS * value_row
    if whole < key_blocks:
        highest, total, mixed = attend_keys(
            asked, asked_scale * tl.load(key_scales + whole), key_values, value, value_row, keys - whole * KEYS,
            highest, total, mixed, WIDTH, BLOCK, KEYS, True,
        )
    row = tl.program_id(0) * QUERIES + local
    place = output + ((batch * queries + row) * heads + head) * WIDTH + lane
    tl.store(place, (mixed / total[:, None]).to(output.dtype.element_ty), (row < queries) & (lane < WIDTH))


def attention(query: Tensor, key: Tensor, value: Tensor, config: LaunchConfig) -> Tensor:
    """Softmax attention over (batch, heads, tokens, width) in half precision, its scores by products in int8; tensors
    as triton.attention.attention takes them.

    config: as int8_attention_kernel has them. Raises what Triton raises.
    """
    (batch, heads, queries, width), keys = query.shape, key.shape[2]
    queries_of_block, keys_of_block, warps, stages = config
    block = max(FEWEST_LANES, triton.next_power_of_2(width))
    chunk, count = HELD // block, batch * heads
    chunks = triton.cdiv(keys, chunk)
    query_blocks, key_blocks = triton.cdiv(queries, queries_of_block), triton.cdiv(keys, keys_of_block)

    def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((count, *shape), device=query.device, dtype=dtype)

    sums, query_scales, key_scales = numbers(chunks, block), numbers(query_blocks), numbers(key_blocks)
    query_values = numbers(query_blocks * queries_of_block, block, dtype=torch.int8)
    key_values = numbers(key_blocks * keys_of_block, block, dtype=torch.int8)
    sum_keys[(chunks, count)](key, sums, keys, heads, key.stride(0), key.stride(2), width, block, chunk)
    round_tokens[(query_blocks + key_blocks, count)](
        query, key, sums, query_values, query_scales, key_values, key_scales, queries, keys, chunks, heads,
        width**-0.5 * LOG2_E, query.stride(0), query.stride(2), key.stride(0), key.stride(2), width, block,
        queries_of_block, keys_of_block, PARTS, SMALLEST_MAXIMUM,
    )
    output = query.new_empty((batch, queries, heads, width))
    attend[(query_blocks, count)](
        query_values, query_scales, key_values, key_scales, value, output, queries, keys, heads, value.stride(0),
        value.stride(2), width, block, queries_of_block, keys_of_block, num_warps=warps, num_stages=stages,
    )
    return output.transpose(1, 2)


class Int8Attention:
    """Softmax attention as ops.attention.Attention, with scores in int8 where that is chosen."""

    def __init__(self, exact: Attend, choose: Choose, launches: Launches) -> None:
        self._exact, self._choose, self._launches = exact, choose, launches

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, upcast: bool = False) -> Tensor:
        if upcast or not self._serves(query, key, value):
            return self._exact(query, key, value, upcast)
        config = self._launches.of(int8_attention_kernel(query.shape[3]), shape_class(query.shape), query.dtype)
        return attention(query, key, value, config)

    def _serves(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        if query.shape != key.shape or query.dtype not in DTYPES or not may_gain(query.shape):
            return False
        return self._choose(query.shape, query.dtype) and all(map(heads_lie_beside, (query, key, value)))

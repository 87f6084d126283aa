"""Attention in one pass over the keys (flash attention; Dao et al. 2022), cut for few of them.

A cross attention has some 77 keys, which one program holds at once; the libraries' kernels are made for thousands, and
take twice as long. Sums, the softmax among them, are in float32.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_config import ATTENTION, LaunchConfig

DTYPES = (torch.float16, torch.bfloat16)
# exp2 is one instruction, exp is two.
LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["queries", "keys", "heads"])
def attend(
    query, key, value, output, queries, keys, heads, scale, query_batch, query_row, key_batch, key_row, value_batch,
    value_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):
    """output (batch, queries, heads, WIDTH). A row is what lies from one token to the next.

    Triton must know that the strides are multiples of 16, or it loads number by number; in every known model they are.
    """
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    row = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    mine = (row < queries) & (lane < WIDTH)
    asked = tl.load(query + batch * query_batch + row.to(tl.int64) * query_row + head * WIDTH + lane, mine, 0.0)
    key_start = key + batch * key_batch + head * WIDTH
    value_start = value + batch * value_batch + head * WIDTH
    highest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, BLOCK), tl.float32)
    for start in range(0, keys, KEYS):
        across = start + tl.arange(0, KEYS)[None, :]
        down = start + tl.arange(0, KEYS)[:, None]
        there = (down < keys) & (lane < WIDTH)
        compared = tl.load(key_start + down.to(tl.int64) * key_row + lane, there, 0.0)
        scores = tl.where(across < keys, tl.dot(asked, tl.trans(compared)) * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fading = tl.exp2(highest - higher)
        total = total * fading + tl.sum(weights, 1)
        values = tl.load(value_start + down.to(tl.int64) * value_row + lane, there, 0.0)
        mixed = tl.dot(weights.to(values.dtype), values, mixed * fading[:, None])
        highest = higher
    place = output + ((batch * queries + row) * heads + head) * WIDTH + lane
    tl.store(place, (mixed / total[:, None]).to(output.dtype.element_ty), mine)


def attention(query: Tensor, key: Tensor, value: Tensor, config: LaunchConfig = ATTENTION.candidates[0]) -> Tensor:
    """Softmax attention over (batch, heads, tokens, width) in half precision, for parts of one GEMM's output: heads lie
    beside each other in memory. config: queries and keys of a block, warps, and stages of loading.
    """
    batch, heads, queries, width = query.shape
    output = query.new_empty((batch, queries, heads, width))
    queries_of_block, keys_of_block, warps, stages = config
    attend[(triton.cdiv(queries, queries_of_block), batch * heads)](
        query, key, value, output, queries, key.shape[2], heads, width**-0.5 * LOG2_E, query.stride(0),
        query.stride(2), key.stride(0), key.stride(2), value.stride(0), value.stride(2), width,
        max(16, triton.next_power_of_2(width)), queries_of_block, keys_of_block, num_warps=warps, num_stages=stages,
    )
    return output.transpose(1, 2)


def heads_lie_beside(tensor: Tensor) -> bool:
    """Whether the heads of (batch, heads, tokens, width) lie beside each other in memory, as a GEMM leaves them."""
    return tensor.stride(3) == 1 and tensor.stride(1) == tensor.shape[3]

"""Attention over few keys, in one pass (flash attention; Dao et al. 2022)."""
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["queries", "keys", "heads"])
def attend(
    query, key, value, output, queries, keys, heads, scale, query_batch, query_row, key_batch, key_row, value_batch,
    value_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):
    """Softmax attention of QUERIES queries of one head to all keys, which are few (flash attention): written to output.

    Grid: (blocks of QUERIES queries, batch * heads).
    query, key, value: (batch, tokens, heads, WIDTH) in half precision. The heads of a token are adjacent in memory.
    query_batch, query_row and so on: the distances from one image to the next, and from one token to the next, in
        numbers. They must be multiples of 16, so that Triton loads several numbers at once; in every known model they
        are.
    output: (batch, queries, heads, WIDTH), contiguous.
    queries, keys: the numbers of their tokens.
    scale: WIDTH**-0.5 * log2(e), because the weights are computed by exp2.
    BLOCK: WIDTH rounded up to a power of two, at least 16. KEYS: the number of keys that are loaded at once.
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

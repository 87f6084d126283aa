"""Sums over what lies in many tensors."""
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_words(
    addresses, counts, steps, tensors, starts, sums, PIECE: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr,
):
    """sums[tensor] += a stretch of the words of a tensor that are read, each times an odd number of its place.

    addresses, counts: of all words of each tensor; of these, each steps-th piece is read. tensors, starts: which
    stretch each program has, (programs,).
    """
    program = tl.program_id(0)
    tensor, start = tl.load(tensors + program), tl.load(starts + program)
    memory = tl.load(addresses + tensor).to(tl.pointer_type(tl.int32))
    count, step = tl.load(counts + tensor), tl.load(steps + tensor)
    total = tl.zeros((BLOCK,), tl.int64)
    for offset in range(0, WORDS, BLOCK):
        place = start + offset + tl.arange(0, BLOCK)
        word = (place // PIECE) * PIECE * step + place % PIECE
        total += tl.load(memory + word, word < count, 0).to(tl.int64) * (2 * place + 1)
    tl.atomic_add(sums + tensor, tl.sum(total, 0))

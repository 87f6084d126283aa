"""Checksums of tensors. weights/contents.py compares them to notice that weights were edited."""
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_words(
    addresses, counts, steps, tensors, starts, sums, PIECE: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr,
):
    """Add one stretch of a tensor to the tensor's checksum: sums[tensor] += the sum of word * (2 * place + 1).

    A word is 4 bytes, read as int32. A tensor consists of pieces of PIECE words, of which the pieces 0, step, 2 * step
    and so on are read. A word's place is its number among the words that are read, from 0 on: the words of skipped
    pieces do not count. The factor differs from place to place, so that words that change places change the sum; it is
    odd, so that no bit of a word is lost.

    Grid: (stretches,). A stretch has WORDS places of one tensor; those after the tensor's end add nothing. BLOCK: how
    many words are loaded at once.
    addresses: int64 (tensors,): of each tensor's first byte, a multiple of 4.
    counts: int64 (tensors,): the number of words in each tensor, with those that are skipped.
    steps: int64 (tensors,): the step of each tensor; 1 if all its pieces are read.
    tensors, starts: int64 (stretches,): the index of each stretch's tensor, and the place at which the stretch begins.
    sums: int64 (tensors,), zeros before the launch. Sums overflow without an error.
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

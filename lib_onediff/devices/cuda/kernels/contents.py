"""Sums over what lies in many tensors, in one launch: weights.contents says what they are for.

Nothing but memory is waited for: all of SDXL's weights take what it takes to read them once.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....weights.contents import PIECE, WORD, Place

# Of one program, and of one of its loads.
WORDS, BLOCK, WARPS = 1 << 13, 1024, 4


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


def sums_of(places: Sequence[Place], part: int) -> Callable[[], Tensor] | None:
    """Launches the sums of these places, (places,) in int64 on their device, as long as their memory is there; None
    where this kernel cannot read them: on several devices, or not in whole words."""
    device = places[0].device
    if any(place.device != device or place.nbytes % WORD or place.address % WORD for place in places):
        return None
    counts, steps = [place.nbytes // WORD for place in places], [place.step(part) for place in places]
    stretches = [
        (index, start) for index, (count, step) in enumerate(zip(counts, steps, strict=True))
        for start in range(0, -(-count // (PIECE * step)) * PIECE, WORDS)
    ]
    on_device = lambda numbers: torch.tensor(numbers, dtype=torch.int64, device=device)  # noqa: E731
    table = [on_device(numbers) for numbers in ([place.address for place in places], counts, steps)]
    table += [on_device([index for index, _ in stretches]), on_device([start for _, start in stretches])]

    def launch() -> Tensor:
        sums = torch.zeros(len(counts), dtype=torch.int64, device=device)
        sum_words[(len(stretches),)](*table, sums, PIECE, BLOCK, WORDS, num_warps=WARPS)
        return sums

    return launch

"""Sums over what lies in many tensors, in one launch: weights.contents says what they are for.

Nothing but memory is waited for: all of SDXL's weights take what it takes to read them once.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ....weights.contents import PIECE, WORD, Place
from .launching import launch

# Of one program, and of one of its loads.
WORDS, BLOCK, WARPS = 1 << 13, 1024, 4


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

    def read() -> Tensor:
        sums = torch.zeros(len(counts), dtype=torch.int64, device=device)
        launch(
            "contents.sum_words", (len(stretches),), *table, sums, warps=WARPS, PIECE=PIECE, BLOCK=BLOCK, WORDS=WORDS
        )
        return sums

    return read

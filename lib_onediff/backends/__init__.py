"""How a bound forward is run for one shape."""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

NATIVE, CUDAGRAPH, EAGER = "native", "cudagraph", "eager"
BACKENDS = (NATIVE, CUDAGRAPH, EAGER)
WITH_GRAPHS = (NATIVE, CUDAGRAPH)


class Steps(NamedTuple):
    """The backends to try, the best first, and why that is not the one that was wanted."""

    backends: tuple[str, ...]
    reason: str


def steps(wanted: str, device: torch.device, why_not_native: Callable[[torch.device], str | None]) -> Steps:
    """What to try on a device. wanted: "auto" or one of BACKENDS. why_not_native: what our kernels lack there."""
    if wanted == EAGER:
        return Steps((EAGER,), "")
    if device.type != "cuda":
        return Steps((EAGER,), f"CUDA graphs need a GPU, and this UNet is on the {device.type}")
    lack = "" if wanted == CUDAGRAPH else why_not_native(device)
    return Steps((NATIVE, CUDAGRAPH), "") if lack is None else Steps((CUDAGRAPH,), lack)


def launched_steps(
    wanted: str, device: torch.device, why_not_native: Callable[[torch.device], str | None]
) -> Steps:
    """As steps, for work that is launched operator by operator: without a graph, cudagraph is eager."""
    if device.type != "cuda":
        return Steps((EAGER,), "")
    found = steps(wanted, device, why_not_native)
    names = dict.fromkeys(name if name == NATIVE else EAGER for name in found.backends)
    return Steps(tuple(names), found.reason)

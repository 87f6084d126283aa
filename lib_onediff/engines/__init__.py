"""How a bound forward is run for one shape."""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..shapes.key import Lossy

AUTO = "auto"
NATIVE, CUDAGRAPH, EAGER, ONEFLOW = "native", "cudagraph", "eager", "oneflow"
WITH_GRAPHS = (NATIVE, CUDAGRAPH)
# These take weights that a host casts or changes at each use.
ON_THE_FLY = (NATIVE, CUDAGRAPH, EAGER)


class Candidates(NamedTuple):
    """The backends to try, the best first, and why that is not the one that was wanted. lossy: what the native one
    computes less exactly, to be tried before all is exact."""

    backends: tuple[str, ...]
    reason: str
    lossy: tuple[Lossy, ...] = ()


def candidates(wanted: str, device: torch.device, why_not_native: Callable[[torch.device], str | None]) -> Candidates:
    """What to try on a device. wanted: as settings.Settings.backend. why_not_native: what our kernels lack there."""
    if wanted == EAGER:
        return Candidates((EAGER,), "")
    if device.type != "cuda":
        return Candidates((EAGER,), f"CUDA graphs need an NVIDIA GPU; this UNet is on the {device.type.upper()}")
    lack = "" if wanted == CUDAGRAPH else why_not_native(device)
    return Candidates((NATIVE, CUDAGRAPH), "") if lack is None else Candidates((CUDAGRAPH,), lack)


def launched_candidates(
    wanted: str, device: torch.device, why_not_native: Callable[[torch.device], str | None]
) -> Candidates:
    """As candidates, for work that is launched operator by operator: without a graph, cudagraph is eager."""
    if device.type != "cuda":
        return Candidates((EAGER,), "")
    found = candidates(wanted, device, why_not_native)
    names = dict.fromkeys(name if name == NATIVE else EAGER for name in found.backends)
    return Candidates(tuple(names), found.reason)

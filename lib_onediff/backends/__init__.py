"""How a bound forward is run for one shape."""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

NATIVE, CUDAGRAPH, EAGER, ONEFLOW = "native", "cudagraph", "eager", "oneflow"
# native, with the largest matrix products in float8: a backend of its own, so that where it fails native serves.
FLOAT8 = "native fp8"
OUR_KERNELS = (FLOAT8, NATIVE)
WITH_GRAPHS = (FLOAT8, NATIVE, CUDAGRAPH)


class Steps(NamedTuple):
    """The backends to try, the best first, and why that is not the one that was wanted."""

    backends: tuple[str, ...]
    reason: str


def steps(wanted: str, device: torch.device, why_not_native: Callable[[torch.device], str | None]) -> Steps:
    """What to try on a device. wanted: as settings.Settings.backend. why_not_native: what our kernels lack there."""
    if wanted == EAGER:
        return Steps((EAGER,), "")
    if device.type != "cuda":
        return Steps((EAGER,), f"CUDA graphs need a GPU, and this UNet is on the {device.type}")
    lack = "" if wanted == CUDAGRAPH else why_not_native(device)
    return Steps((NATIVE, CUDAGRAPH), "") if lack is None else Steps((CUDAGRAPH,), lack)


def with_float8(found: Steps, why_not: Callable[[], str | None]) -> Steps:
    """The same steps with float8 before them, or the reason why not. why_not: what the device lacks for that."""
    if found.backends[0] != NATIVE:
        return Steps(found.backends, f"FP8 needs the native backend: {found.reason or 'another one was chosen'}")
    lack = why_not()
    return Steps((FLOAT8, *found.backends), "") if lack is None else Steps(found.backends, lack)


def launched_steps(
    wanted: str, device: torch.device, why_not_native: Callable[[torch.device], str | None]
) -> Steps:
    """As steps, for work that is launched operator by operator: without a graph, cudagraph is eager."""
    if device.type != "cuda":
        return Steps((EAGER,), "")
    found = steps(wanted, device, why_not_native)
    names = dict.fromkeys(name if name == NATIVE else EAGER for name in found.backends)
    return Steps(tuple(names), found.reason)

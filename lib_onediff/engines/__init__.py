"""How a bound forward is run for one shape."""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

AUTO = "auto"
NATIVE, CUDAGRAPH, EAGER, ONEFLOW = "native", "cudagraph", "eager", "oneflow"
# native, with the largest matrix products in eight bits: backends of their own, so that where they fail native serves.
# LOW_BIT has each product in the kind that is the fastest.
FLOAT8, INT8, LOW_BIT = "native fp8", "native int8", "native low-bit"
LOW_BIT_BACKENDS = {"fp8": FLOAT8, "int8": INT8, AUTO: LOW_BIT}
# Those that have every weight that they can take in eight bits alone on the GPU, by those that have both.
LOW_BIT_ONLY = {backend: f"{backend} only" for backend in LOW_BIT_BACKENDS.values()}
# Those with self attention in INT8 as well where it gains, by those without.
WITH_ATTENTION = {name: f"{name} + attention" for name in (*LOW_BIT_BACKENDS.values(), *LOW_BIT_ONLY.values())}
WITHOUT_ATTENTION = {attending: name for name, attending in WITH_ATTENTION.items()}
OFFLOADING = (*LOW_BIT_ONLY.values(), *(WITH_ATTENTION[only] for only in LOW_BIT_ONLY.values()))
WITH_LOW_BIT = (*WITH_ATTENTION, *WITHOUT_ATTENTION)
OUR_KERNELS = (*WITH_LOW_BIT, NATIVE)
WITH_GRAPHS = (*OUR_KERNELS, CUDAGRAPH)
# These take weights that a host casts or changes at each use. The others' operators hand on more than tensors, or were
# compiled for weights as they are.
ON_THE_FLY = (NATIVE, CUDAGRAPH, EAGER)


class Candidates(NamedTuple):
    """The backends to try, the best first, and why that is not the one that was wanted."""

    backends: tuple[str, ...]
    reason: str


def candidates(
    wanted: str, device: torch.device, why_not_native: Callable[[torch.device], str | None]
) -> Candidates:
    """What to try on a device. wanted: as settings.Settings.backend. why_not_native: what our kernels lack there."""
    if wanted == EAGER:
        return Candidates((EAGER,), "")
    if device.type != "cuda":
        return Candidates((EAGER,), f"CUDA graphs need an NVIDIA GPU; this UNet is on the {device.type.upper()}")
    lack = "" if wanted == CUDAGRAPH else why_not_native(device)
    return Candidates((NATIVE, CUDAGRAPH), "") if lack is None else Candidates((CUDAGRAPH,), lack)


def with_low_bit(found: Candidates, wanted: str, why_not: Callable[[], str | None]) -> Candidates:
    """The same steps with products in eight bits before them, or the reason why not. wanted: as
    settings.Settings.low_bit. why_not: what the device lacks for that."""
    if found.backends[0] != NATIVE:
        other = found.reason or "another one was chosen"
        return Candidates(found.backends, f"Low-bit needs the native backend: {other}")
    lack = why_not()
    if lack is not None:
        return Candidates(found.backends, lack)
    return Candidates((LOW_BIT_BACKENDS[wanted], *found.backends), "")


def with_low_bit_only(found: Candidates, wanted: str, why_not: Callable[[str], str | None]) -> Candidates:
    """The steps of with_low_bit with the GPU's weights in eight bits alone before them, or the reason why not. why_not:
    what stands in the way of this backend."""
    backend = LOW_BIT_ONLY[LOW_BIT_BACKENDS[wanted]]
    if found.backends[0] not in (NATIVE, LOW_BIT_BACKENDS[wanted]):
        return found
    lack = why_not(backend)
    if lack is not None:
        return Candidates(found.backends, "; ".join(dict.fromkeys(filter(None, (lack, found.reason)))))
    return Candidates((backend, *found.backends), "")


def with_low_bit_attention(found: Candidates, wanted: str, why_not: Callable[[], str | None]) -> Candidates:
    """The steps of with_low_bit or with_low_bit_only with the first one's products and self attention in INT8 before
    them, or also the reason why not. Where no product gains, attention may. why_not: what stands in its way."""
    first = found.backends[0]
    beside = LOW_BIT_BACKENDS[wanted] if first == NATIVE else first
    if beside not in WITH_ATTENTION:
        return found
    lack = why_not()
    if lack is not None:
        return Candidates(found.backends, "; ".join(dict.fromkeys(filter(None, (found.reason, lack)))))
    return Candidates((WITH_ATTENTION[beside], *found.backends), found.reason)


def launched_candidates(
    wanted: str, device: torch.device, why_not_native: Callable[[torch.device], str | None]
) -> Candidates:
    """As candidates, for work that is launched operator by operator: without a graph, cudagraph is eager."""
    if device.type != "cuda":
        return Candidates((EAGER,), "")
    found = candidates(wanted, device, why_not_native)
    names = dict.fromkeys(name if name == NATIVE else EAGER for name in found.backends)
    return Candidates(tuple(names), found.reason)

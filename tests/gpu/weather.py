"""Calls of a UNet on a real GPU, each held to the model's own forward, and what may go wrong in them."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from exact_operators import relative_error
from gpu_calls import host
from torch import Tensor, nn

from lib_onediff.core.table import Entry
from lib_onediff.devices.cuda.kernels import tokens as triton_tokens
from lib_onediff.public import status
from lib_onediff.runtime.runtime import runtime

CLOSE = 1e-2


@torch.no_grad()
def use(unet: nn.Module, given: dict[str, Any], calls: int = 4) -> None:
    """Several calls, each of which must have the right output: what fails is tried twice."""
    for _ in range(calls):
        output = unet(**given, return_dict=False)[0]
        assert relative_error(output, host(unet, given)) < CLOSE, status()


def now() -> tuple[str, str]:
    return status()["backend"], status()["route"]


def entry_of(backend: str, resolution: str = "128x128") -> Entry:
    [entry] = [
        entry for entry in runtime.table.entries()
        if entry.key.backend == backend and entry.key.resolution == resolution
    ]
    return entry


def gpu_is_usable() -> bool:
    torch.cuda.synchronize()
    return bool(torch.randn(8, device="cuda").isfinite().all())


def geglu_that(disturbs: Callable[[], object]) -> Callable[..., Tensor]:
    """The real kernel, with something going wrong before it."""
    original = triton_tokens.geglu

    def geglu(tokens: Tensor, *tuning: int) -> Tensor:
        disturbs()
        return original(tokens, *tuning)

    return geglu


def while_capturing(disturb: Callable[[], object]) -> Callable[[], None]:
    def disturbs() -> None:
        if torch.cuda.is_current_stream_capturing():
            disturb()

    return disturbs


def out_of_memory() -> None:
    raise torch.cuda.OutOfMemoryError("CUDA out of memory")

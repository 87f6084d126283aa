"""Compile the kernels that a network needs side by side, before its first call waits for one after the other."""
from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ...core.tuning_cache import TuningCache
from ...weights.low_bit import Kind
from .kernels.launch_config import Launches
from .kernels.tuning import compilations
from .low_bit.tuning import low_bit_compilations

MOST_THREADS = 8


def compile_kernels(
    users: Iterable[Any], dtype: torch.dtype, device: torch.device, configs: Launches | None = None,
    low_bit: Collection[Kind] = (),
) -> None:
    """Launch every kernel that a network with these layers (kernel_users of its layout) needs once, on a few numbers.

    configs: how they are launched, None for each one's first candidate. low_bit: also those for these kinds of eight
    bits. What was compiled before costs a millisecond. Raises what Triton raises.
    """
    network, chosen = list(users), configs or Launches(TuningCache())
    first, *others = compilations(network, dtype, device, chosen)
    for kind in low_bit:
        others += low_bit_compilations(network, dtype, device, chosen, kind)
    # Triton sets itself up in the first launch of all, and not for several threads at once.
    launch(first, device)
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "onediff-kernels") as pool:
        for done in [pool.submit(launch, other, device) for other in others]:
            done.result()


def launch(work: Callable[[], object], device: torch.device) -> None:
    with torch.cuda.device(device), torch.inference_mode(False), torch.no_grad():
        work()
        torch.cuda.current_stream().synchronize()

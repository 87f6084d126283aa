"""The size of the GPUs' memory, and how much of it is free."""
from __future__ import annotations

import logging
from contextlib import AbstractContextManager

import torch

from .units import MEBIBYTE

log = logging.getLogger("onediff")
# Stands for the free memory of a CPU, which is not measured.
UNLIMITED = 2**62
# The memory that OneDiff leaves free for other programs: 1 / LEAST_SHARE of the card, but from LEAST to MOST bytes.
LEAST_SHARE = 32
LEAST = 256 * MEBIBYTE
MOST = 1024 * MEBIBYTE


class Card:
    """Reads how much GPU memory there is, and how much is used. A class without state, so that tests can replace it."""

    def all(self) -> list[torch.device]:
        """Every GPU that torch can use; [] without one."""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [torch.device("cuda", index) for index in range(count)]

    def using(self, device: torch.device) -> AbstractContextManager[object]:
        """A context in which this GPU is torch's current one. Only for GPUs; see card.on_card for any device."""
        return torch.cuda.device(device)

    def total(self, device: torch.device | None = None) -> int:
        """Bytes of a GPU's whole memory; 0 for a CPU. None: torch's current GPU."""
        if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
            return 0
        return torch.cuda.get_device_properties(device).total_memory

    def free(self, device: torch.device) -> int:
        """Bytes that torch can still get from the driver, without the memory that it has reserved already. Less if the
        user has limited torch to a fraction of the GPU; never negative; UNLIMITED for a CPU. Takes tens of
        microseconds."""
        if device.type != "cuda":
            return UNLIMITED
        free, total = torch.cuda.mem_get_info(device)
        if hasattr(torch.cuda, "get_per_process_memory_fraction"):
            fraction = torch.cuda.get_per_process_memory_fraction(device)
            free = min(free, int(fraction * total) - torch.cuda.memory_reserved(device))
        return max(0, free)

    def unused(self, device: torch.device) -> int:
        """Bytes that torch has reserved on a GPU and no tensor uses, including those in the graphs' memory pools; 0 for
        a CPU."""
        if device.type != "cuda":
            return 0
        return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    def reserved(self) -> int:
        """Bytes that torch has reserved from the driver, on all GPUs together."""
        return sum(torch.cuda.memory_reserved(device) for device in range(torch.cuda.device_count()))

    def wait(self, device: torch.device) -> None:
        """Wait until the GPU has finished all work launched so far, in all streams. Does nothing for a CPU."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    @staticmethod
    def empty_cache() -> None:
        """Return torch's unused GPU memory to the driver, on all GPUs. Does nothing without a GPU, and while any thread
        captures a CUDA graph, because torch does not allow it then."""
        if not torch.cuda.is_available():
            return
        try:
            torch.cuda.empty_cache()
        except RuntimeError as refusal:
            log.debug("torch's memory cache cannot be emptied now: %s", refusal)

    def room(self, device: torch.device) -> int:
        """Bytes that weights may still take on a GPU: free() + unused() - spare(). Negative if more than that is in use
        already; nearly UNLIMITED for a CPU."""
        return self.free(device) + self.unused(device) - self.spare(device)

    def spare(self, device: torch.device) -> int:
        """Bytes that OneDiff leaves free for other programs on a GPU; LEAST for a CPU."""
        return min(MOST, max(LEAST, self.total(device) // LEAST_SHARE))

"""The size of the GPUs' memory, and how much of it is free."""
from __future__ import annotations

import logging
from contextlib import AbstractContextManager

import torch

from .units import MEBIBYTE

log = logging.getLogger("onediff")
UNLIMITED = 2**62
# The memory that OneDiff leaves free for others: 1 / LEAST_SHARE of the card, from LEAST to MOST bytes.
LEAST_SHARE = 32
LEAST = 256 * MEBIBYTE
MOST = 1024 * MEBIBYTE


class Card:
    """Reads the memory of the GPUs that this process can use. A class, so that tests can replace it; has no state."""

    def all(self) -> list[torch.device]:
        """Every GPU that torch can use."""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [torch.device("cuda", index) for index in range(count)]

    def using(self, device: torch.device) -> AbstractContextManager[object]:
        """A context in which this GPU is torch's current one, as card.on_card(); tests replace it."""
        return torch.cuda.device(device)

    def total(self, device: torch.device | None = None) -> int:
        """Bytes of the card's whole memory, by default of torch's current GPU; 0 for a CPU."""
        if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
            return 0
        return torch.cuda.get_device_properties(device).total_memory

    def free(self, device: torch.device) -> int:
        """Bytes that this process can still allocate from the driver; UNLIMITED for a CPU. Takes tens of microseconds.
        """
        if device.type != "cuda":
            return UNLIMITED
        free, total = torch.cuda.mem_get_info(device)
        if hasattr(torch.cuda, "get_per_process_memory_fraction"):
            fraction = torch.cuda.get_per_process_memory_fraction(device)
            free = min(free, int(fraction * total) - torch.cuda.memory_reserved(device))
        return max(0, free)

    def unused(self, device: torch.device) -> int:
        """Bytes that torch has reserved and no tensor uses, including those in the graphs' memory pools."""
        if device.type != "cuda":
            return 0
        return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    def reserved(self) -> int:
        """Bytes that torch has reserved on all GPUs."""
        return sum(torch.cuda.memory_reserved(device) for device in range(torch.cuda.device_count()))

    def wait(self, device: torch.device) -> None:
        """Wait until the card has finished all work that was launched."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    @staticmethod
    def empty_cache() -> None:
        """Return torch's unused GPU memory to the driver. Does nothing while any thread captures a CUDA graph, because
        torch does not allow it then."""
        if not torch.cuda.is_available():
            return
        try:
            torch.cuda.empty_cache()
        except RuntimeError as refusal:
            log.debug("torch's memory cache cannot be emptied now: %s", refusal)

    def room(self, device: torch.device) -> int:
        """Bytes that weights may still take on a GPU: all free ones, minus spare()."""
        return self.free(device) + self.unused(device) - self.spare(device)

    def spare(self, device: torch.device) -> int:
        """Bytes that OneDiff leaves free for others on a card."""
        return min(MOST, max(LEAST, self.total(device) // LEAST_SHARE))

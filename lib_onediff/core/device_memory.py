"""How much memory a GPU has, and how much of it anybody can still have."""
from __future__ import annotations

import logging
from contextlib import AbstractContextManager

import torch

from .units import MEBIBYTE

log = logging.getLogger("onediff")
UNLIMITED = 2**62
# What must stay for whoever needs it next, as a share of the card, and within which limits.
LEAST_SHARE = 32
LEAST = 256 * MEBIBYTE
MOST = 1024 * MEBIBYTE


class Card:
    """The GPUs and their memory, as this process can have them."""

    def all(self) -> list[torch.device]:
        """Every GPU that torch can use."""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [torch.device("cuda", index) for index in range(count)]

    def using(self, device: torch.device) -> AbstractContextManager[object]:
        """Kernels are launched there inside."""
        return torch.cuda.device(device)

    def total(self, device: torch.device | None = None) -> int:
        """Bytes of the whole card, by default of the one that torch uses; 0 for what is none."""
        if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
            return 0
        return torch.cuda.get_device_properties(device).total_memory

    def free(self, device: torch.device) -> int:
        """What the driver would still give this process: tens of microseconds."""
        if device.type != "cuda":
            return UNLIMITED
        free, total = torch.cuda.mem_get_info(device)
        if hasattr(torch.cuda, "get_per_process_memory_fraction"):
            fraction = torch.cuda.get_per_process_memory_fraction(device)
            free = min(free, int(fraction * total) - torch.cuda.memory_reserved(device))
        return max(0, free)

    def unused(self, device: torch.device) -> int:
        """What torch holds and nobody uses, the graphs' memory included."""
        if device.type != "cuda":
            return 0
        return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    def reserved(self) -> int:
        """What torch holds of all GPUs' memory."""
        return sum(torch.cuda.memory_reserved(device) for device in range(torch.cuda.device_count()))

    def wait(self, device: torch.device) -> None:
        """Wait until the card has done all that it was told."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    @staticmethod
    def empty_cache() -> None:
        """Return torch's unused GPU memory to the driver. Does nothing while any thread captures a CUDA graph, which
        torch does not allow: it is returned the next time."""
        if not torch.cuda.is_available():
            return
        try:
            torch.cuda.empty_cache()
        except RuntimeError as refusal:
            log.debug("torch's cache is not emptied now: %s", refusal)

    def room(self, device: torch.device) -> int:
        """Bytes that weights may take there, with some to spare for whoever else uses the GPU."""
        return self.free(device) + self.unused(device) - self.spare(device)

    def spare(self, device: torch.device) -> int:
        """What should be left of a card for others."""
        return min(MOST, max(LEAST, self.total(device) // LEAST_SHARE))

"""Give graphs up before the host runs out of GPU memory, and when it has."""
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from ...core.guard import Guard
from ...core.key import LATENT_PIXEL
from .accounting import Holdings, PoolKey
from .cache import GraphCache

log = logging.getLogger("onediff")
Result = TypeVar("Result")
# The most that a VAE's decoder has in use at a time, for each pixel, in values: images of 256 channels before, between
# and after its norms and convolutions.
VALUES_PER_DECODED_PIXEL = 1024
SECONDS_BETWEEN_LOOKS = 2.0


class MemoryPressure:
    """Asked wherever somebody else is about to need GPU memory; nothing of it is asked at every step."""

    def __init__(
        self, holdings: Holdings, graphs: GraphCache, lock: threading.RLock, guard: Guard, is_busy: Callable[[], bool]
    ) -> None:
        """is_busy: whether the host is making an image."""
        self._now, self._graphs, self._lock, self._guard, self._is_busy = holdings, graphs, lock, guard, is_busy
        self._watcher: threading.Thread | None = None

    def before_sampling(self, architecture: str | None, budget: int) -> None:
        """A UNet of this architecture is about to be sampled; None: of one that is not known yet. budget: what graphs
        may hold, in MiB; 0: a quarter of the card."""
        for device in self._now.devices():
            self._relieve(PoolKey(device, architecture))
            with self._lock:
                self._graphs.keep_within(budget, PoolKey(device, architecture))

    def before_decode(self, latent: torch.Tensor) -> None:
        """A latent, (batch, channels, ..., h, w), is about to be decoded; a host may need several GiB for that."""
        if latent.device in self._now.devices():
            batch, (height, width) = latent.shape[0], latent.shape[-2:]
            pixels = batch * height * width * LATENT_PIXEL**2
            wanted = pixels * VALUES_PER_DECODED_PIXEL * latent.element_size()
            self._relieve(PoolKey(latent.device, None), wanted)

    def run_host(self, host: Callable[[], Result]) -> Result:
        """What host() returns; once more without our graphs where it runs out of GPU memory beside them."""
        try:
            return host()
        except torch.cuda.OutOfMemoryError:
            if not self._now.devices():
                raise
        # Only now is everything gone that the host had computed before it failed.
        log.warning("The GPU's memory is full: OneDiff gives its graphs up, and the WebUI tries once more.")
        with self._lock:
            self._graphs.free()
        return host()

    def watch(self) -> None:
        """Notice in a thread, as long as there are graphs, when the host takes their UNet off the GPU or unloads it
        between images: no host says so, and it does that for the memory."""
        if self._now.devices() and (self._watcher is None or not self._watcher.is_alive()):
            self._watcher = threading.Thread(target=self._watch, name="onediff-memory", daemon=True)
            self._watcher.start()

    def _watch(self) -> None:
        while self._now.devices():
            time.sleep(SECONDS_BETWEEN_LOOKS)
            self._guard.attempt("watching the GPU's memory", self._note_lost)

    def _note_lost(self) -> None:
        if self._is_busy():
            # The next sampling looks by itself. Nothing is freed from this thread while an extension may capture.
            return
        with self._lock:
            self._graphs.note_lost()

    def _relieve(self, pool: PoolKey, wanted: int = 0) -> None:
        """Where less than wanted bytes and some to spare are left of a card, drop graphs: those of other architectures,
        then all that are not pinned, then those. Some 100 microseconds where enough is left."""
        now, graphs, enough = self._now, self._graphs, wanted + self._now.card.spare(pool.device)
        with self._lock:
            graphs.note_lost()
            here = {key for key in now.keys() if key.device == pool.device}
            pinned = here & now.pinned()
            others = {key for key in here - pinned if PoolKey.of(key) != pool}
            for doomed in (others, here - pinned - others, pinned):
                left = now.left(pool.device)
                if left >= enough:
                    return
                if doomed:
                    log.info(
                        "%d MiB of the GPU's memory are left: %d graphs are given up.", left // 2**20, len(doomed)
                    )
                    graphs.drop(doomed)

"""The graphs of every UNet in our care: made when a shape is used again, dropped before the host runs out of GPU
memory, and when it has."""
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import TypeVar

import torch
from torch import nn

from ...core.attempt import HostError
from ...core.call import Call
from ...core.guard import Guard
from ...core.inputs import cloned_inputs
from ...core.key import LATENT_PIXEL, ShapeKey
from ...core.operators import Operators
from ...core.table import Entry, ShapeTable, State
from ...core.weak_dictionary import WeakDictionary
from ..network import Network
from ..verify import rewinder_of_all
from .accounting import SMALL_THINGS, Holdings, PoolKey, fits, memory_of, needs_of, too_large

log = logging.getLogger("onediff")
Result = TypeVar("Result")
CARD_IS_FULL = "the GPU's memory is nearly full, so its graph waits until there is room"
NO_ROOM_BESIDE = "the setting 'Graph memory in MiB' leaves no room for graphs between functions of other extensions"
PINNED_TAKE_IT = "pinned resolutions of another model hold the memory that all graphs may have"
# The most that a VAE's decoder has in use at a time, for each pixel, in values: images of 256 channels before, between
# and after its norms and convolutions.
VALUES_PER_DECODED_PIXEL = 1024
SECONDS_BETWEEN_LOOKS = 2.0
# What makes room where the host runs out of memory, for people.
GRAPHS = "OneDiff gives its graphs up"
WEIGHTS = "the WebUI takes some of its weights off the GPU"


class GraphCache:
    """Keeps each UNet's graphs with its Network, and the table's states true to them. Whoever makes or drops any
    holds the runtime's lock."""

    def __init__(
        self, holdings: Holdings, table: ShapeTable, networks: WeakDictionary[nn.Module, Network],
        operators_of: Callable[[str, bool], Operators],
    ) -> None:
        self._now = holdings
        self._table = table
        self._networks = networks
        self._operators_of = operators_of
        self._shared_noticed = 0

    # --- to make --------------------------------------------------------------------------------------------------

    def measured(self, entry: Entry, work: Callable[[], Result]) -> Result:
        """work(), a plain call of this shape, which tells once what the shape's graph will need."""
        if entry.needs:
            return work()
        device = entry.key.device
        held = self._now.applied_bytes(entry.key.device)
        result, peak = self._now.made.peak(device, work)
        # What weights are copied to may have been made in it, and no graph needs another.
        peak -= self._now.applied_bytes(device) - held
        entry.needs = needs_of(peak, self._now.made.in_one_piece(device))
        return result

    def capture(self, network: Network, entry: Entry, budget: int, call: Call) -> int:
        """Make the graph of a shape that a call was just served at, within a budget in MiB for all graphs of the device
        (0: a quarter of the card). Returns how many bytes of the card it lacks, or leaves over (less than 0); 0 where
        that does not decide.

        Where it does not fit, entry.no_graph says so, and entry.waits where it may later.
        Raises torch.cuda.OutOfMemoryError, and RuntimeError where the forward cannot be captured.
        """
        device = entry.key.device
        allowed = self._now.allowed(budget, entry.key.device)
        if not fits(memory_of(entry.needs), allowed):
            entry.no_graph = too_large(memory_of(entry.needs), allowed)
            return 0
        entry.waits, lacking = self._why_wait(entry, allowed)
        if entry.waits:
            return lacking
        self._make(network, entry, call)
        if fits(self._now.held(device), allowed):
            return lacking
        # In a memory made for it alone it takes less; the others are captured into that at their next use.
        pool = PoolKey.of(entry.key)
        self._drop_pool(pool)
        if entry.key.patches:
            # A capture calls functions of other extensions, whose state is set back for one.
            entry.no_graph = NO_ROOM_BESIDE
            return lacking
        self._make(network, entry, call)
        if not fits(self._now.held(device), allowed):
            needed = self._now.held_by(pool)
            self._drop({entry.key})
            entry.needs = needed
            entry.no_graph = too_large(needed, allowed)
        return lacking

    def _why_wait(self, entry: Entry, allowed: int) -> tuple[str, int]:
        """Make room for a graph that would fit alone; why that is not possible now, if so, and what capture returns."""
        pool = PoolKey.of(entry.key)
        device = entry.key.device
        growth = max(0, memory_of(entry.needs) - self._now.made.bytes(*pool))
        others = self._now.others(pool)
        while others and not fits(self._now.held(device) + growth, allowed):
            self.drop(others.pop(0))
        if not fits(self._now.held(device) + growth, allowed) and self._now.held(device) - self._now.held_by(pool) > 0:
            return PINNED_TAKE_IT, 0
        if not growth:
            return "", 0
        lacking = self._lacking(growth, device)
        while others and lacking > 0:
            self.drop(others.pop(0))
            lacking = self._lacking(growth, device)
        if lacking > 0:
            return CARD_IS_FULL, lacking
        if growth > self._now.card.free(device):
            # A capture cannot ask torch for what it keeps unused.
            self._now.card.empty_cache()
        return "", lacking

    def _lacking(self, growth: int, device: torch.device) -> int:
        return growth + self._now.card.spare(device) - self._now.left(device)

    def _make(self, network: Network, entry: Entry, call: Call) -> None:
        key = entry.key
        before = self._now.made.bytes(key.device, key.architecture)
        operators = self._operators_of(key.backend, network.has_wide_norms)
        runner = self._now.made.prepare(
            key.architecture, network.source(key.lossy, call), operators, cloned_inputs(call), entry.needs
        )
        log.debug("captured %s", key)
        grown = max(0, runner.memory.bytes - before)
        if grown:
            # What the plain calls before it left in torch's cache is not needed beside the graph's own memory.
            self._now.card.empty_cache()
        # What was captured into a new memory has shown exactly what it needs.
        entry.needs = max(entry.needs, 0 if before else grown - SMALL_THINGS) or grown
        entry.state = State.READY
        entry.waits = ""
        network.keep(key, runner)
        self._shared_noticed = self._now.shared()

    def keep_within(self, budget: int, pool: PoolKey) -> None:
        """Make the graphs of a device hold no more than a budget in MiB, which may be another than when they were made.
        pool: whose UNet is used now; the graphs of others go first."""
        device = pool.device
        allowed = self._now.allowed(budget, pool.device)
        others = self._now.others(pool)
        while others and not fits(self._now.held(device), allowed):
            self.drop(others.pop(0))
        for one in {PoolKey.of(key) for key in self._now.keys() if key.device == device}:
            if not fits(self._now.held(device), allowed):
                self._drop_pool(one)

    # --- to throw away --------------------------------------------------------------------------------------------

    def drop(self, keys: Collection[ShapeKey]) -> None:
        """Drop the graphs of these shapes and give their memory back. Those that lie in the same memory go with them,
        where that is worth it: the next call at a shape captures its graph again, in less."""
        self._drop({*keys, *self._now.memory().beside(keys)})

    def _drop_pool(self, pool: PoolKey) -> None:
        """Drop every graph of an architecture, and their memory with them."""
        self._drop({key for key in self._now.keys() if PoolKey.of(key) == pool})

    def forget(self, keys: Collection[ShapeKey]) -> int:
        """Drop the graphs and the entries of these shapes. Returns the bytes that came back."""
        # What torch keeps unused would be counted as if these graphs had held it.
        self._now.card.empty_cache()
        reserved = self._now.card.reserved()
        self.drop(keys)
        self._table.forget(keys)
        return max(0, reserved - self._now.card.reserved())

    def free(self) -> int:
        """Drop every graph and hand all unused memory back to the driver; the next call at a shape captures again.
        Returns the bytes that came back."""
        reserved = self._now.card.reserved()
        for network in self._networks.values():
            network.step_memories.clear()
            self._drop_low_bit_weights(network)
            network.bound.drop_applied()
        self._drop({*self._now.keys(), *(entry.key for entry in self._table.entries() if entry.state is State.READY)})
        return max(0, reserved - self._now.card.reserved())

    def drop_low_bit(self, network: Network) -> None:
        """Drop what a UNet's calls in eight bits need, and give the memory back."""
        if network.low_bit is not None:
            self._drop_low_bit_weights(network)
            self._now.card.empty_cache()

    def shrink_low_bit(self, network: Network, size: int) -> None:
        """Have weights in eight bits that stand for others hold so many bytes less, where some stay: the others are
        copied again."""
        low_bit = network.low_bit
        if low_bit is not None and low_bit.are_alone and low_bit.bytes > size:
            low_bit.give_up(size)
            self._drop({key for key in network.runners if key.lossy.low_bit})

    def _drop_low_bit_weights(self, network: Network) -> None:
        # Their graphs know where they lie.
        self._drop({key for key in network.runners if key.lossy.low_bit})
        network.low_bit = None

    def note_lost(self) -> None:
        """Graphs go with their UNet when a host unloads it, and are of no use when it was taken off the GPU: let the
        table say so, and give their memory back."""
        for network in self._networks.values():
            network.let_go_if_moved()
        held = self._now.keys()
        for entry in self._table.entries():
            if entry.state is State.READY and entry.key not in held:
                entry.state = State.PROVED
        if self._now.shared() < self._shared_noticed:
            self._now.card.empty_cache()
        self._shared_noticed = self._now.shared()

    def _drop(self, keys: Collection[ShapeKey]) -> None:
        for device in self._now.made.devices():
            # The last replay may not be over, and its memory is about to go.
            self._now.card.wait(device)
        for network in self._networks.values():
            network.drop_runners(keys)
        for key, entry in self._table.by_key().items():
            if key in keys and entry.state is State.READY:
                entry.state = State.PROVED
        self._now.card.empty_cache()
        self._shared_noticed = self._now.shared()


class MemoryPressure:
    """Asked wherever somebody else is about to need GPU memory; nothing of it is asked at every step."""

    def __init__(
        self, holdings: Holdings, graphs: GraphCache, lock: threading.RLock, guard: Guard, is_busy: Callable[[], bool]
    ) -> None:
        """is_busy: whether the host is making an image."""
        self._now = holdings
        self._graphs = graphs
        self._lock = lock
        self._guard = guard
        self._is_busy = is_busy
        self._watcher: threading.Thread | None = None
        self._starting = threading.Lock()

    def before_sampling(self, architecture: str | None, budget: int) -> None:
        """A UNet of this architecture is about to be sampled; None: of one that is not known yet. budget: what graphs
        may hold, in MiB; 0: a quarter of the card."""
        for device in self._now.made.devices():
            self._relieve(PoolKey(device, architecture))
            with self._lock:
                self._graphs.keep_within(budget, PoolKey(device, architecture))

    def before_decode(self, latent: torch.Tensor) -> None:
        """A latent, (batch, channels, ..., h, w), is about to be decoded; a host may need several GiB for that."""
        if latent.device in self._now.made.devices():
            batch = latent.shape[0]
            height, width = latent.shape[-2:]
            pixels = batch * height * width * LATENT_PIXEL**2
            wanted = pixels * VALUES_PER_DECODED_PIXEL * latent.element_size()
            self._relieve(PoolKey(latent.device, None), wanted)

    def run_host(self, host: Callable[[], Result], make_room: Callable[[], bool] | None = None) -> Result:
        """What host() returns; once more without our graphs where it runs out of GPU memory beside them. make_room: see
        Network.make_room."""
        devices = self._now.made.devices()
        may_retry = bool(devices) or make_room is not None
        rewinds = [rewinder_of_all(device) for device in devices or {torch.device("cpu")}] if may_retry else []
        try:
            return host()
        except (torch.cuda.OutOfMemoryError, HostError) as error:
            if isinstance(error, HostError) and not error.is_out_of_memory:
                raise
            given = [GRAPHS] if self._now.made.devices() else []
            given += [WEIGHTS] if make_room is not None and make_room() else []
            if not given:
                raise
        # Only now is everything gone that the host had computed before it failed.
        log.warning("The GPU's memory is full: %s, and the WebUI tries once more.", ", ".join(given))
        with self._lock:
            self._graphs.free()
        for rewind in rewinds:
            # Functions of extensions draw the numbers that they would have drawn.
            rewind()
        return host()

    def watch(self) -> None:
        """Notice in a thread, as long as there are graphs, when the host takes their UNet off the GPU or unloads it
        between images: no host says so, and it does that for the memory."""
        if not self._now.made.devices():
            return
        with self._starting:
            if self._watcher is None or not self._watcher.is_alive():
                self._watcher = threading.Thread(target=self._watch, name="onediff-memory", daemon=True)
                self._watcher.start()

    def _watch(self) -> None:
        while self._now.made.devices():
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
        now = self._now
        graphs = self._graphs
        enough = wanted + self._now.card.spare(pool.device)
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
            if wanted and now.left(pool.device) < enough:
                # The weights in eight bits too.
                graphs.free()

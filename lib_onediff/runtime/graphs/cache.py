"""Makes and drops the CUDA graphs of all networks.

A graph is made when a shape is used again. Graphs are dropped before the host runs out of GPU memory, and when it has.
"""
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
# Reasons, for users, why a shape has no graph: for now (Entry.waits), for good (Entry.no_graph), and for now.
CARD_IS_FULL = (
    "the GPU's memory is nearly full: OneDiff computes this size without a CUDA graph (slower) until there is room"
)
NO_ROOM_BESIDE = "'Graph memory in MiB' is too small for CUDA graphs with functions of other extensions: raise it"
PINNED_TAKE_IT = (
    "OneDiff computes this size without a CUDA graph (slower), because pinned sizes of another model, or its copies of "
    "weights, take up 'Graph memory in MiB': raise it, or unpin sizes (OneDiff tab, Cache)"
)
# The peak of a VAE decoder's tensors, in values for each pixel of the image: a few feature maps of 256 channels at a
# time around its norms and convolutions.
VALUES_PER_DECODED_PIXEL = 1024
# The pause of the thread MemoryPressure._watch.
SECONDS_BETWEEN_LOOKS = 2.0
# How room is made when the host runs out of GPU memory, in words for the user.
GRAPHS = "OneDiff frees its CUDA graphs"
WEIGHTS = "the WebUI moves weights to main memory"


class GraphCache:
    """Makes and drops the graphs in Network.runners, and keeps the states in the table up to date. Callers hold the
    runtime's lock."""

    def __init__(
        self, holdings: Holdings, table: ShapeTable, networks: WeakDictionary[nn.Module, Network],
        operators_of: Callable[[str, bool], Operators],
    ) -> None:
        """operators_of: operators_of(backend, has_wide_norms) returns the operators of the backend of this name;
        has_wide_norms: see Network.has_wide_norms."""
        self._holdings = holdings
        self._table = table
        self._networks = networks
        self._operators_of = operators_of
        self._shared_noticed = 0

    # --- making graphs --------------------------------------------------------------------------------------------

    def measured(self, entry: Entry, work: Callable[[], Result]) -> Result:
        """The result of work(), which computes a call of this shape without a graph. If entry.needs is 0 (unknown), it
        becomes the estimated bytes that the shape's graph will need, from the peak of memory in work()."""
        if entry.needs:
            return work()
        device = entry.key.device
        before = self._holdings.applied_bytes(device)
        result, peak = self._holdings.made.peak(device, work)
        # work() may have allocated buffers for streamed weights. A graph uses the same buffers.
        peak -= self._holdings.applied_bytes(device) - before
        entry.needs = needs_of(peak, self._holdings.made.in_one_piece(device))
        return result

    def capture(self, network: Network, entry: Entry, budget: int, call: Call) -> int:
        """Capture the graph of a shape, for a call that was just served without one. Drops other graphs, least recently
        used first, if they must make room.

        budget: in MiB, for all of OneDiff on the device; 0: a quarter of the GPU's memory. Returns how many bytes of
        free GPU memory the graph lacks, which the caller may ask the host for (negative: how many are left over); 0 if
        the GPU's free memory did not matter, because the budget decided or the pool does not grow. If the graph does
        not fit, it is not made: entry.no_graph has the reason if no later call may make it, otherwise entry.waits.
        Raises torch.cuda.OutOfMemoryError, and RuntimeError if the forward cannot be captured.
        """
        device = entry.key.device
        allowed = self._holdings.allowed(budget, entry.key.device)
        if not fits(memory_of(entry.needs), allowed):
            entry.no_graph = too_large(memory_of(entry.needs), allowed)
            return 0
        entry.waits, lacking = self._why_wait(entry, allowed)
        if entry.waits:
            return lacking
        self._make(network, entry, call)
        if fits(self._holdings.held(device), allowed):
            return lacking
        # In a new pool made for this graph alone, it takes less. The other graphs are captured again at their next use.
        pool = PoolKey.of(entry.key)
        self._drop_pool(pool)
        if entry.key.patches:
            # Each capture calls the functions of other extensions, whose state is restored for one capture alone.
            entry.no_graph = NO_ROOM_BESIDE
            return lacking
        self._make(network, entry, call)
        taken = self._holdings.held(device)
        if not fits(taken, allowed):
            needed = self._holdings.held_by(pool)
            self._drop({entry.key})
            entry.needs = needed
            entry.no_graph = too_large(taken, allowed)
        return lacking

    def _why_wait(self, entry: Entry, allowed: int) -> tuple[str, int]:
        """Drop graphs of other pools, the least recently used pool first, until a new graph fits into the budget and
        the GPU's free memory, or until only pools with pinned graphs are left. Returns why the graph has to wait ("" if
        it may be made now), and the number of bytes that capture() returns."""
        pool = PoolKey.of(entry.key)
        device = entry.key.device
        growth = max(0, memory_of(entry.needs) - self._holdings.made.bytes(*pool))
        others = self._holdings.others(pool)
        while others and not fits(self._holdings.held(device) + growth, allowed):
            self.drop(others.pop(0))
        held = self._holdings.held(device)
        if not fits(held + growth, allowed) and held - self._holdings.held_by(pool) > 0:
            return PINNED_TAKE_IT, 0
        if not growth:
            return "", 0
        lacking = self._lacking(growth, device)
        while others and lacking > 0:
            self.drop(others.pop(0))
            lacking = self._lacking(growth, device)
        if lacking > 0:
            return CARD_IS_FULL, lacking
        if growth > self._holdings.card.free(device):
            # A capture cannot use memory that torch has reserved outside of the graphs' pool.
            self._holdings.card.empty_cache()
        return "", lacking

    def _lacking(self, growth: int, device: torch.device) -> int:
        """Bytes that must become free on the device so that graphs can take `growth` more bytes and still leave
        Card.spare() to the host; negative: bytes that are left over."""
        return growth + self._holdings.card.spare(device) - self._holdings.left(device)

    def _make(self, network: Network, entry: Entry, call: Call) -> None:
        """Capture the graph: the entry becomes READY, and if the graph is the first one of a new pool, entry.needs is
        raised to the measured bytes. Raises the exceptions of GraphMaker.prepare."""
        key = entry.key
        before = self._holdings.made.bytes(key.device, key.architecture)
        operators = self._operators_of(key.backend, network.has_wide_norms)
        runner = self._holdings.made.prepare(
            key.architecture, network.source(key.lossy, call), operators, cloned_inputs(call), entry.needs
        )
        log.debug("captured %s", key)
        grown = max(0, runner.memory.bytes - before)
        if grown:
            # Memory that the calls without a graph have left in torch's cache is not needed any more.
            self._holdings.card.empty_cache()
        # A capture into a new pool shows exactly how much the graph needs.
        entry.needs = max(entry.needs, 0 if before else grown - SMALL_THINGS) or grown
        entry.state = State.READY
        entry.waits = ""
        network.keep(key, runner)
        self._shared_noticed = self._holdings.shared()

    def keep_within(self, budget: int, pool: PoolKey) -> None:
        """Drop graphs of the pool's device until OneDiff is within its budget in MiB, which may have been lowered since
        they were made; 0: a quarter of the GPU's memory. pool: the pool of the network in use. The other pools without
        pinned graphs are dropped first; if that is not enough, every pool, until it is."""
        device = pool.device
        allowed = self._holdings.allowed(budget, pool.device)
        others = self._holdings.others(pool)
        while others and not fits(self._holdings.held(device), allowed):
            self.drop(others.pop(0))
        for one in {PoolKey.of(key) for key in self._holdings.keys() if key.device == device}:
            if not fits(self._holdings.held(device), allowed):
                self._drop_pool(one)

    # --- dropping graphs ------------------------------------------------------------------------------------------

    def drop(self, keys: Collection[ShapeKey]) -> None:
        """Drop the graphs of these shapes. If their pool can get much smaller without these graphs
        (SharedMemory.shrinks), all graphs of the pool are dropped, and the pool is freed; the other shapes' graphs are
        captured again, into less memory, at their next call. Otherwise the pool keeps its memory."""
        self._drop({*keys, *self._holdings.memory().dropped_with(keys)})

    def _drop_pool(self, pool: PoolKey) -> None:
        """Drop all graphs of a pool, and free it."""
        self._drop({key for key in self._holdings.keys() if PoolKey.of(key) == pool})

    def forget(self, keys: Collection[ShapeKey]) -> int:
        """Drop the graphs of these shapes, and remove their entries from the table. Returns the number of bytes of GPU
        memory that this frees."""
        # Free torch's unused memory first, so that it is not counted below.
        self._holdings.card.empty_cache()
        reserved = self._holdings.card.reserved()
        self.drop(keys)
        self._table.forget(keys)
        return max(0, reserved - self._holdings.card.reserved())

    def free(self) -> int:
        """Drop all graphs, 8-bit weights, memories of step policies, and the tensors that BoundNetwork.drop_applied
        frees, and return unused memory to the driver. All are made again when they are needed. A network's copy on a
        second GPU stays: TwoGpusRoute.forget drops it. Returns the number of bytes of GPU memory that this frees."""
        reserved = self._holdings.card.reserved()
        for network in self._networks.values():
            network.step_memories.clear()
            self._drop_low_bit_weights(network)
            network.bound.drop_applied()
        ready = {entry.key for entry in self._table.entries() if entry.state is State.READY}
        self._drop(self._holdings.keys() | ready)
        return max(0, reserved - self._holdings.card.reserved())

    def drop_low_bit(self, network: Network) -> None:
        """Drop a network's 8-bit weights and the graphs that read them, and free their memory. Does nothing if the
        network has none."""
        if network.low_bit is not None:
            self._drop_low_bit_weights(network)
            self._holdings.card.empty_cache()

    def shrink_low_bit(self, network: Network, size: int) -> None:
        """Drop at least `size` bytes of the 8-bit weights that replace weights in main memory, and all graphs that read
        8-bit weights. The layers without an 8-bit weight are streamed again. Does nothing if these 8-bit weights have
        at most `size` bytes in all, or replace none."""
        low_bit = network.low_bit
        if low_bit is not None and low_bit.are_alone and low_bit.bytes > size:
            low_bit.give_up(size)
            self._drop({key for key in network.runners if key.lossy.low_bit})

    def _drop_low_bit_weights(self, network: Network) -> None:
        """Drop a network's 8-bit weights, and the graphs that read them. torch keeps the weights' memory reserved."""
        # Graphs contain the addresses of these weights.
        self._drop({key for key in network.runners if key.lossy.low_bit})
        network.low_bit = None

    def note_lost(self) -> None:
        """Update the table, and free memory, after the host has unloaded networks or moved them off the GPU: their
        graphs are gone or useless."""
        for network in self._networks.values():
            network.let_go_if_moved()
        with_graph = self._holdings.keys()
        for entry in self._table.entries():
            if entry.state is State.READY and entry.key not in with_graph:
                entry.state = State.PROVED
        if self._holdings.shared() < self._shared_noticed:
            self._holdings.card.empty_cache()
        self._shared_noticed = self._holdings.shared()

    def _drop(self, keys: Collection[ShapeKey]) -> None:
        """Drop the graphs of exactly these shapes, after waiting until the GPUs have finished their work; READY entries
        of these shapes become PROVED. A pool is freed only with its last graph."""
        for device in self._holdings.made.devices():
            # The last replay may still run in the memory that is freed now.
            self._holdings.card.wait(device)
        for network in self._networks.values():
            network.drop_runners(keys)
        for key, entry in self._table.by_key().items():
            if key in keys and entry.state is State.READY:
                entry.state = State.PROVED
        self._holdings.card.empty_cache()
        self._shared_noticed = self._holdings.shared()


class MemoryPressure:
    """Frees OneDiff's GPU memory when the host is about to need it: before a sampling, before a decode, when the host's
    code runs out of memory (run_host), and in a thread between images."""

    def __init__(
        self, holdings: Holdings, graphs: GraphCache, lock: threading.RLock, guard: Guard, is_busy: Callable[[], bool]
    ) -> None:
        """is_busy: whether the host is making an image."""
        self._holdings = holdings
        self._graphs = graphs
        self._lock = lock
        self._guard = guard
        self._is_busy = is_busy
        self._watcher: threading.Thread | None = None
        self._starting = threading.Lock()

    def before_sampling(self, architecture: str | None, budget: int) -> None:
        """Drop graphs before a sampling, on every GPU with graphs, until the GPU has the free memory that OneDiff
        leaves to others (Card.spare), and OneDiff is within its budget. architecture: the architecture of the network
        to be used, whose graphs are dropped last; None if unknown. budget: in MiB; 0: a quarter of the GPU's memory."""
        for device in self._holdings.made.devices():
            self._relieve(PoolKey(device, architecture))
            with self._lock:
                self._graphs.keep_within(budget, PoolKey(device, architecture))

    def before_decode(self, latent: torch.Tensor) -> None:
        """Drop graphs, and other memory of OneDiff if that is not enough, until the decode of a latent, (batch,
        channels, ..., h, w), has the memory that it is estimated to need, which may be several GiB. Does nothing on a
        device without graphs."""
        if latent.device in self._holdings.made.devices():
            batch = latent.shape[0]
            height, width = latent.shape[-2:]
            pixels = batch * height * width * LATENT_PIXEL**2
            wanted = pixels * VALUES_PER_DECODED_PIXEL * latent.element_size()
            self._relieve(PoolKey(latent.device, None), wanted)

    def run_host(self, host: Callable[[], Result], make_room: Callable[[], bool] | None = None) -> Result:
        """The result of host(), the host's own code. If host() runs out of GPU memory, OneDiff frees everything of
        GraphCache.free(), restores the random states, and calls host() once more. If OneDiff has no graphs and
        make_room() moves nothing, host() is not called again, and its exception is raised.

        make_room: asks the host to move weights off the GPU as well, and returns whether it has; see Network.make_room.
        None: the host is not asked. Raises any exception of host().
        """
        devices = self._holdings.made.devices()
        may_retry = bool(devices) or make_room is not None
        rewinds = [rewinder_of_all(device) for device in devices or {torch.device("cpu")}] if may_retry else []
        try:
            return host()
        except (torch.cuda.OutOfMemoryError, HostError) as error:
            if isinstance(error, HostError) and not error.is_out_of_memory:
                raise
            given = [GRAPHS] if self._holdings.made.devices() else []
            given += [WEIGHTS] if make_room is not None and make_room() else []
            if not given:
                raise
        # Outside of the handler, tensors that the host had computed before it failed are freed.
        log.warning("The GPU's memory is full: %s, and the step or decode is computed again.", ", ".join(given))
        with self._lock:
            self._graphs.free()
        for rewind in rewinds:
            # So that functions of extensions draw the same random numbers again.
            rewind()
        return host()

    def watch(self) -> None:
        """Start the watching thread (_watch), if there are graphs and the thread does not run yet. Called when an image
        is done: between images, hosts unload networks or move them off the GPU to free memory, without announcing
        it."""
        if not self._holdings.made.devices():
            return
        with self._starting:
            if self._watcher is None or not self._watcher.is_alive():
                self._watcher = threading.Thread(target=self._watch, name="onediff-memory", daemon=True)
                self._watcher.start()

    def _watch(self) -> None:
        """The thread's function: every SECONDS_BETWEEN_LOOKS, frees the graphs of networks that the host has unloaded
        or moved. Ends when no graphs are left."""
        while self._holdings.made.devices():
            time.sleep(SECONDS_BETWEEN_LOOKS)
            self._guard.attempt("watching the GPU's memory", self._note_lost)

    def _note_lost(self) -> None:
        """GraphCache.note_lost() under the lock, unless the host is making an image."""
        if self._is_busy():
            # The next sampling looks too. This thread must not free memory while an extension may capture a graph.
            return
        with self._lock:
            self._graphs.note_lost()

    def _relieve(self, pool: PoolKey, wanted: int = 0) -> None:
        """Drop graphs of the pool's device until `wanted` bytes and the bytes of Card.spare() are free: first the
        graphs of other pools that are not pinned, then all that are not pinned, then the pinned ones. If `wanted` is
        not 0 and that many bytes are still not free, GraphCache.free() frees the rest. Takes about 100 microseconds if
        enough is free."""
        now = self._holdings
        graphs = self._graphs
        enough = wanted + self._holdings.card.spare(pool.device)
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
                        "GPU memory is short (%d MiB free): OneDiff frees %d CUDA graphs. Images stay the same.",
                        left // 2**20, len(doomed),
                    )
                    graphs.drop(doomed)
            if wanted and now.left(pool.device) < enough:
                # This frees 8-bit weights and the tensors of drop_applied too.
                graphs.free()

"""What the UNet's route and the VAE's share: settings, what is known of shapes, operators, memory, and the lock."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import nn

from ..core.call import Call
from ..core.card import TuningCache
from ..core.device import Device, TimeMs
from ..core.family import Family
from ..core.guard import Guard
from ..core.key import ShapeKey
from ..core.settings import Settings
from ..core.stream_order import StreamOrder
from ..core.table import Entry, ShapeTable
from ..core.weak_dictionary import WeakDictionary
from ..devices.registry import Devices, devices_here, graph_maker
from ..families.registry import DECODERS, FAMILIES, Families
from ..store.history import History
from .call_stats import CallStats
from .graphs.accounting import Holdings
from .graphs.cache import GraphCache, MemoryPressure
from .network import Network

# Why the host computes, in one line for the user.
SWITCHED_OFF = "OneDiff is switched off"
TRAINING = "gradients are being recorded (training?)"


class Services:
    """Made once. Whoever computes or captures does it inside computing().

    is_between_graphs: whether a function of another extension is being called between two graphs of a UNet. The replay
    of another call would then overwrite memory that the second graph reads.
    """

    def __init__(self, devices: Iterable[Device] | None = None, families: Iterable[Family] | None = None) -> None:
        """By default, those of the registries."""
        self.families = FAMILIES if families is None else Families(families)
        self.decoders = DECODERS
        # Stands around every hook of ours.
        self.guard = Guard()
        self.settings = Settings()
        self.history = History()
        self.call_stats = CallStats()
        self.generations = self.call_stats.generations
        self.table = ShapeTable(
            self._kept_shapes, lambda entries: self.call_stats.forget(entries, self.table.entries)
        )
        # What was measured to be best on this machine.
        self.tuning_cache = TuningCache()
        self.devices = Devices(
            devices_here(self.tuning_cache, self.families.output) if devices is None else devices, self.families.read
        )
        # What is kept for every UNet that a host has handed over.
        self.networks: WeakDictionary[nn.Module, Network] = WeakDictionary()
        self.holdings = Holdings(
            self.table, self.networks, lambda: self.history.pins(), graph_maker(self.families.output)
        )
        self.graphs = GraphCache(self.holdings, self.table, self.networks, self.devices.operators)
        self.is_between_graphs = False
        self.order = StreamOrder()
        self.lock = self.order.lock
        # Who needs GPU memory besides us asks here.
        self.pressure = MemoryPressure(
            self.holdings, self.graphs, self.lock, self.guard, lambda: self.generations.innermost is not None
        )

    def _kept_shapes(self) -> Callable[[Entry], bool]:
        """Whether a shape stays in the table however long it was not used: it has a graph, or is pinned."""
        pins = self.history.pins()
        graphs: set[ShapeKey] = set()
        for network in self.networks.values():
            # Copied at one stroke: another thread may make graphs.
            graphs.update(list(network.runners))
        return lambda entry: entry.key in graphs or entry.place in pins

    @property
    def is_warm_up(self) -> bool:
        """Whether this thread's calls are a warm-up; see ThisThread."""
        return self.generations.this_thread.is_warm_up

    def time_ms(self, call: Call) -> TimeMs:
        """How long work takes in a graph where this call is computed."""
        return partial(self.holdings.made.time_ms, call.latent.device, call.latent.dtype)

    def computing(self, device: torch.device) -> AbstractContextManager[object]:
        """Kernels launched inside run alone, and on this device, whichever is torch's current one outside: other
        threads wait for the lock, and the GPU finishes the work of other streams first. It may be entered again."""
        return self.order.turn(device)

    def release_memory(self) -> int:
        """Drop every graph and empty torch's caches; what was checked stays checked. Returns the bytes given back.

        Users have it called while no image is being made; see hosts.contract.WebUI.exclusively.
        """
        with self.lock:
            return self.graphs.free()

"""The objects shared by the routes of UNets and VAEs: settings, the table of shapes, backends, memory, the lock."""
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

# Reasons why the host computes, in one line for the user.
SWITCHED_OFF = "OneDiff is switched off"
TRAINING = "PyTorch records gradients, as for training (use torch.inference_mode())"


class Services:
    """The runtime's shared objects, made once. Code that launches or captures work on a GPU runs inside computing().

    networks: every UNet or transformer that OneDiff serves, with its record.
    table, history: the state of each shape, in this process and on the disk.
    holdings: counts the memory of all graphs. graphs: makes and drops them. pressure: frees them for the host.
    order, lock: see StreamOrder. The lock also protects bindings, graphs and 8-bit weights.
    is_between_graphs: whether a call is being replayed, or captured, in segments, between which functions of other
        extensions run. Such a function may call the UNet again; PatchedRoute sets this flag, and the host computes that
        inner call, because its graph would overwrite memory that the next segment reads.
    """

    def __init__(self, devices: Iterable[Device] | None = None, families: Iterable[Family] | None = None) -> None:
        """devices, families: by default those of the registries."""
        self.families = FAMILIES if families is None else Families(families)
        self.decoders = DECODERS
        self.guard = Guard()
        self.settings = Settings()
        self.history = History()
        self.call_stats = CallStats()
        self.generations = self.call_stats.generations
        self.table = ShapeTable(
            self._kept_shapes, lambda entries: self.call_stats.forget(entries, self.table.entries)
        )
        self.tuning_cache = TuningCache()
        self.devices = Devices(
            devices_here(self.tuning_cache, self.families.output) if devices is None else devices, self.families.read
        )
        # Every UNet or transformer that OneDiff serves.
        self.networks: WeakDictionary[nn.Module, Network] = WeakDictionary()
        self.holdings = Holdings(
            self.table, self.networks, lambda: self.history.pins(), graph_maker(self.families.output)
        )
        self.graphs = GraphCache(self.holdings, self.table, self.networks, self.devices.operators)
        self.is_between_graphs = False
        self.order = StreamOrder()
        self.lock = self.order.lock
        self.pressure = MemoryPressure(
            self.holdings, self.graphs, self.lock, self.guard, lambda: self.generations.innermost is not None
        )

    def _kept_shapes(self) -> Callable[[Entry], bool]:
        """A function that returns whether an entry must stay in the table when others are removed to keep it small: at
        the time of this call, the shape had a graph or its resolution was pinned."""
        pins = self.history.pins()
        graphs: set[ShapeKey] = set()
        for network in self.networks.values():
            # list() is atomic; another thread may make graphs meanwhile.
            graphs.update(list(network.runners))
        return lambda entry: entry.key in graphs or entry.place in pins

    @property
    def is_warm_up(self) -> bool:
        """Whether this thread's calls are a warm-up; see generations.ThisThread."""
        return self.generations.this_thread.is_warm_up

    def time_ms(self, call: Call) -> TimeMs:
        """A timer with which backends choose between kernels: timer(work) captures work() as a graph on the call's
        device, and returns the milliseconds that a replay takes. work() must compute its matrix products in the call's
        dtype: their workspaces are allocated before the capture."""
        return partial(self.holdings.made.time_ms, call.latent.device, call.latent.dtype)

    def computing(self, device: torch.device) -> AbstractContextManager[object]:
        """A context in which only this thread launches work of ours, and the device is torch's current GPU: other
        threads wait for the lock, and the GPU finishes their work first. It can be entered again and again; see
        StreamOrder.turn."""
        return self.order.turn(device)

    def release_memory(self) -> int:
        """Drop all graphs and other GPU memory of OneDiff, except networks' copies on a second GPU (GraphCache.free),
        and return unused memory to the driver. Returns the number of bytes that this frees. Shapes that were checked
        need no new check.

        Called if GPU memory has run out, and by pages and the API while no image is being made (see
        hosts.contract.WebUI.exclusively). Takes the lock.
        """
        with self.lock:
            return self.graphs.free()

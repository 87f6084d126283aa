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

# Reasons, for users, why the host computes a call or a decode.
SWITCHED_OFF = "OneDiff is switched off"
TRAINING = (
    "PyTorch records gradients, as for training, maybe by an extension (in your own code, use torch.inference_mode())"
)


class Services:
    """The runtime's shared objects, made once. Code that launches or captures work on a GPU runs inside computing().

    families, decoders: the families of networks, and of VAEs, that may be served.
    guard: catches and logs our faults.
    settings: the runtime's settings; see Runtime.settings.
    call_stats: counts calls and images. generations: the generations in progress.
    networks: every UNet or transformer that OneDiff serves, with its record; copies on a second GPU too.
    table, history: the state of each shape, in this process and on the disk.
    tuning_cache: measured choices of kernels, errors of Low-bit, and the like, also on the disk.
    devices: the backends.
    holdings: counts the memory of all graphs. graphs: makes and drops the graphs. pressure: drops graphs for the host.
    order, lock: see StreamOrder. The lock also protects bindings, graphs and 8-bit weights.
    is_between_graphs: whether a call is being replayed, or captured, in segments, between which functions of other
        extensions run. Such a function may call the UNet again; PatchedRoute sets this flag, and the host computes the
        inner call, because a graph of the inner call would overwrite memory that the next segment reads.
    """

    def __init__(self, devices: Iterable[Device] | None = None, families: Iterable[Family] | None = None) -> None:
        """devices, families: None for those of the registries."""
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
        """A function for the table, which removes entries to stay small: it returns whether an entry must stay, because
        its shape had a graph, or its resolution was pinned, when _kept_shapes was called."""
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
        device, and returns the milliseconds that a replay takes. work() must compute its matrix products in the dtype
        of the call's latent, because the products' workspaces are allocated before the capture."""
        return partial(self.holdings.made.time_ms, call.latent.device, call.latent.dtype)

    def computing(self, device: torch.device) -> AbstractContextManager[object]:
        """A context in which only this thread launches work of ours, and the device is torch's current GPU. Other
        threads wait for the lock; this thread's work starts when the GPU has finished theirs. The context can be
        entered several times, also inside of itself; see StreamOrder.turn."""
        return self.order.turn(device)

    def release_memory(self) -> int:
        """Drop all graphs and other GPU memory of OneDiff, except networks' copies on a second GPU (GraphCache.free),
        and return unused memory to the driver. Returns the number of bytes of GPU memory that this frees. Shapes that
        were checked need no new check.

        Called if GPU memory has run out, and by pages and the API while no image is being made (see
        hosts.contract.WebUI.exclusively). Takes the lock.
        """
        with self.lock:
            return self.graphs.free()

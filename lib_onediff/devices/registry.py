"""The backends of this machine, and the choice among them. A new backend is a file or folder here, and one name in
devices_here."""
from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from ..core.card import TuningCache, card_name
from ..core.device import Candidates, Device, GraphMaker, KernelUse
from ..core.family import Output
from ..core.operators import Operators
from ..core.refusal import Refusal
from ..core.settings import Settings
from ..core.version import NEWEST_TORCH, release
from ..weights.contents import ContentsReader
from .cuda.graphs.capture import CudaGraphs as GraphsOfCuda
from .cuda.native import Native
from .oneflow.route import OneFlow
from .torch.device import CudaGraphs, Eager


def devices_here(tuning_cache: TuningCache, output: Output) -> tuple[Device, ...]:
    """A new object of each backend, the fastest first, the reference last. tuning_cache: keeps measurements. output:
    computes a call's forward by given operators; see Families.output."""
    return OneFlow(output), Native(tuning_cache), CudaGraphs(), Eager()


def graph_maker(output: Output) -> GraphMaker:
    """A new GraphMaker, which captures graphs for all backends that have CUDA graphs. output: see devices_here."""
    return GraphsOfCuda(output)


class Devices:
    """Chooses among backends. The last one, the reference, serves every call on every torch.device.

    devices: all backends, the fastest first; kept as `all`.
    read: returns a network's layout; see Families.read.
    reference: the last backend.
    """

    def __init__(self, devices: Iterable[Device], read: Callable[[nn.Module], Any]) -> None:
        self._read = read
        self.all = tuple(devices)
        self.reference = self.all[-1]
        self._worker = ThreadPoolExecutor(1, "onediff-devices")

    def named(self, name: str) -> Device:
        """The backend of this name. Raises StopIteration if there is none."""
        return next(device for device in self.all if device.name == name)

    def has_graphs(self, name: str | None) -> bool:
        """Whether the backend of this name has CUDA graphs; False if there is no such backend."""
        return any(one.name == name and one.traits.has_graphs for one in self.all)

    @property
    def lossy(self) -> Any:
        """The backend with 8-bit products; None if there is none."""
        return next((device for device in self.all if device.traits.takes_lossy), None)

    def candidates(self, settings: Settings, device: torch.device, dtype: torch.dtype, is_warm_up: bool) -> Candidates:
        """The backends to try for a whole call of a network of this dtype on this device, at least one: the one in the
        settings and all slower ones, or all backends if the setting is "auto". Backends that the settings do not ask
        for, that refuse, or that adds_to rules out are left out.

        Candidates.reason is the first refusal of a backend that is faster than all those found; "" if there is none.
        is_warm_up: see Device.refuse.
        """
        found: list[Device] = []
        reason = ""
        for one in self._from(settings.backend):
            if not one.is_wanted(settings) or not adds_to(found, one):
                continue
            try:
                one.refuse(settings, device, dtype, is_warm_up)
            except Refusal as refusal:
                # Only the fastest one's refusal explains to the user why the call is not faster.
                if not found and not reason:
                    reason = str(refusal)
            else:
                found.append(one)
        return Candidates(tuple(found), reason)

    def _from(self, name: str) -> tuple[Device, ...]:
        """The backend of this name and all slower ones; all backends if none has this name."""
        names = [one.name for one in self.all]
        return self.all[names.index(name):] if name in names else self.all

    def launched(self, settings: Settings, device: torch.device, dtype: torch.dtype, is_warm_up: bool) -> Candidates:
        """As candidates(), for work that is launched operator by operator and never captured in a graph, such as a
        VAE's decode. Backends that can only run graphs are replaced by the reference. Without a GPU, Candidates.reason
        is ""."""
        found = self.candidates(settings, device, dtype, is_warm_up)
        launching = dict.fromkeys(one if one.traits.serves_ungraphed else self.reference for one in found.devices)
        # Without a GPU, the reason is about missing graphs, which do not matter here.
        return Candidates(tuple(launching), found.reason if device.type == "cuda" else "")

    def start_line(self, settings: Settings) -> str:
        """One line for the console when the WebUI starts: the backend that float16 networks will use on this machine,
        with device and torch version, and why no faster backend is used. If OneDiff is off, the line says "switched
        off" in place of the backend, and no reason."""
        kinds = ("cuda", torch.cuda), ("xpu", getattr(torch, "xpu", None)), ("mps", torch.backends.mps)
        device = torch.device(next((kind for kind, module in kinds if module and module.is_available()), "cpu"))
        is_newer = release(torch.__version__) > release(NEWEST_TORCH)
        here = f"torch {torch.__version__}{f' (newer than {NEWEST_TORCH}, the newest tested)' if is_newer else ''}"
        found = self.candidates(settings, device, torch.float16, is_warm_up=False)
        way = f"{found.devices[0].name} is used" if settings.enabled else "switched off in the settings"
        why = f": {found.reason}" if settings.enabled and found.reason else ""
        return f"{way} on {card_name(device)} with {here}{why}"

    def contents_reader(self, device: torch.device) -> ContentsReader | None:
        """The function that sums the contents of weights on this device in one launch, from the fastest backend that
        has one; None if none has. See Device.contents_reader."""
        return next((reader for one in self.all if (reader := one.contents_reader(device)) is not None), None)

    def operators(self, name: str, wide_norms: bool = False) -> Operators:
        """The operators of the backend of this name, which must exist; see Device.operators."""
        return self.named(name).operators(wide_norms)

    def forget_measurements(self) -> None:
        """Make all backends forget their measurements in this process. The next calls read them from the tuning cache,
        and measure those that it does not have."""
        for one in self.all:
            one.forget_measurements()

    # --- before the first call ------------------------------------------------------------------------------------

    def prepare_early(
        self, network: nn.Module, settings: Settings, read: Callable[[nn.Module], Any] | None = None
    ) -> None:
        """Start to load the kernels for the first calls of this network, in a thread, so that the first image does not
        wait for them. Returns at once. Does nothing if OneDiff is off, or if the network has no parameters or is
        neither on the CPU nor on a GPU. If the network is on the CPU and there is a GPU, kernels are loaded for the
        GPU. A failure is not reported here: the first call meets it again.

        read: returns the network's layout, for a network that belongs to no Family, such as a VAE; None: Families.read.
        """
        if not settings.enabled:
            return
        parameter = next(network.parameters(), None)
        if parameter is None or parameter.device.type not in ("cpu", "cuda"):
            return
        device = parameter.device
        if device.type == "cpu" and torch.cuda.is_available():
            # The host moves a network in main memory to the GPU when it uses it.
            device = torch.device("cuda", torch.cuda.current_device())
        given = (weakref.ref(network), settings, read or self._read, parameter.dtype, device)
        self._worker.submit(self._prepare, *given)

    def _prepare(
        self, network: weakref.ref[nn.Module], settings: Settings, read: Callable[[nn.Module], Any],
        dtype: torch.dtype, device: torch.device,
    ) -> None:
        """Load the kernels of the fastest backend for this network; see prepare_early. Does nothing if the network is
        gone, or if that backend is the reference, which has no kernels. Runs in the worker's thread."""
        first = self.candidates(settings, device, dtype, is_warm_up=False).devices[0]
        present = network()
        if present is None or first is self.reference:
            return
        with contextlib.suppress(Refusal, RuntimeError):
            layout = read(present)
            # Do not keep the network alive while the kernels load.
            del present
            low_bit = "" if settings.low_bit == "off" else settings.low_bit
            first.prepare(KernelUse(layout.architecture, layout.kernel_users, dtype, device, low_bit))


def adds_to(found: Sequence[Device], device: Device) -> bool:
    """Whether a slower backend (device) is worth trying if the backends in `found` fail. True if `found` is empty.

    False if the slower backend needs channels-last weights and the first of `found` does not: the weights stay in the
    memory format that the first one needs. False also if the slower backend has no graphs and a backend in `found` has:
    the slower one would launch the same operators that have failed in the graph.
    """
    if not found:
        return True
    other_layout = device.traits.channels_last and not found[0].traits.channels_last
    had_graphs = any(before.traits.has_graphs for before in found)
    return not other_layout and (device.traits.has_graphs or not had_graphs)

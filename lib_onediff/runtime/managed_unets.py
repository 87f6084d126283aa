"""The UNets in our care: how hosts hand them over, what they say of their samplings, and how they have them back."""
from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

from torch import nn

from ..engines.managed_unet import ManagedUNet
from ..model.deepcache.sampling import UNANNOUNCED, Sampling
from ..model.layout import UNetLayout, UnsupportedUNet
from ..model.patches import HostTraits
from ..options.settings import Settings
from .services import Services

NOT_HANDED_OVER = "this UNet was not handed to OneDiff"


class ManagedUNets(Services):
    """Knows every UNet that a host has handed over. Nothing here computes."""

    def __init__(self) -> None:
        super().__init__()
        # What the host says of the sampling in progress, whichever UNets it may use for that.
        self._sampling: Sampling | None = None

    def adopt(self, unet: nn.Module, settings: Settings | None = None, host_traits: HostTraits = HostTraits()) -> None:  # noqa: B008
        """Take a UNet into care; nothing of it changes before its first call. settings override the runtime's own."""
        with self._lock:
            known = self._managed.get(unet)
            if known is None:
                managed = self._managed[unet] = ManagedUNet(unet, settings, host_traits)
                managed.bound.offloaded.restore_all = partial(self._restore_present, weakref.ref(unet))
            else:
                known.settings = settings
                known.no_room_for_low_bit, known.why_not_offloaded = False, ""
        if known is None:
            self.operators.prepare_early(unet, settings or self.settings)

    def compiling(self) -> Iterator[Future[Any]]:
        """Begin what the UNets in care still lack; one after the other what has to end until nothing is lacking."""
        for unet, managed in self._managed.items():
            begun = self.operators.prepare_early(unet, managed.settings or self.settings)
            if begun is not None:
                yield begun

    def layout_of(self, unet: nn.Module) -> UNetLayout:
        """The layout of a UNet in our care. Raises UnsupportedUNet with the reason."""
        managed = self._managed.get(unet)
        if managed is None:
            raise UnsupportedUNet(NOT_HANDED_OVER)
        with self._lock:
            return managed.bound.layout_now()

    def managed_unet(self, unet: nn.Module) -> ManagedUNet | None:
        """What is kept for a UNet, or None if it was not handed over."""
        return self._managed.get(unet)

    def take_in(self, unet: nn.Module, managed: ManagedUNet) -> None:
        """Take a UNet of ours into care, which computes a part of the calls of a host's."""
        with self._lock:
            self._managed[unet] = managed

    def release(self, unet: nn.Module) -> None:
        """Give a UNet back as it was: ordinary parameters with the same values, and no memory of ours."""
        with self._lock:
            managed = self._managed.pop(unet, None)
            if managed is not None:
                managed.drop_runners()
                self._graphs.restore(managed)
                managed.bound.release()
                self._graphs.note_lost()

    def restore(self, unet: nn.Module) -> None:
        """Have weights of a UNet that were offloaded back: somebody else is about to compute with them. Raises
        torch.cuda.OutOfMemoryError."""
        managed = self._managed.get(unet)
        if managed is not None and managed.bound.offloaded:
            with self.computing(managed.bound.offloaded.device):
                self._graphs.restore(managed)

    def _restore_present(self, unet: weakref.ref[nn.Module]) -> None:
        present = unet()
        if present is not None:
            self.restore(present)

    def sampling_of(self, managed: ManagedUNet) -> Sampling:
        """The sampling in progress; one whose steps are all whole where nobody has announced any."""
        if self.waits_for_compile:
            # A call that makes a shape ready belongs to no image.
            return Sampling()
        return managed.sampling or self._sampling or Sampling(why_not=UNANNOUNCED)

    def begin_sampling(self, unet: nn.Module, sampling: Sampling | None = None, of_all: bool = True) -> None:
        """A host announces a sampling. sampling: what it says of it. of_all: it may use other UNets for it too, as a
        refiner."""
        managed = self._managed.get(unet)
        if self.generations.innermost is None:
            self.call_stats.show()
        if of_all:
            self._sampling = sampling or Sampling()
        elif managed is not None:
            managed.sampling = sampling or Sampling()
        if managed is not None:
            managed.served_last = managed.no_room_for_low_bit = False
            managed.why_not_offloaded = ""
            managed.bound.begin_sampling()
            budget = (managed.settings or self.settings).memory_budget
            self.pressure.before_sampling(managed.architecture, budget)

    def end_sampling(self, unet: nn.Module | None = None) -> None:
        """A host says that the sampling of a UNet, or of all that it uses, is over: nothing of it counts for later
        calls."""
        if unet is None:
            self._sampling = None
        for one, managed in self._managed.items():
            if unet is None or one is unet:
                managed.sampling = None
                managed.bound.end_sampling()

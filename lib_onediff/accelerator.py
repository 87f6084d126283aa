"""The one runtime object: takes a UNet call, picks the route, runs it, and says why."""
from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import backends
from .backends import eager
from .care import Care
from .graph_cache import GraphCache
from .journal import GRAPH, HOST, PLAIN, Journal
from .modes import autocast_dtype, our_modes
from .ops import torch_ops
from .settings import Settings
from .shapes.history import History
from .shapes.key import ShapeKey, layout_fits
from .shapes.rows import ResolutionRow, rows_of
from .shapes.table import Entry, ShapeTable, State
from .shapes.timing import Stopwatch
from .unet.bound import BoundUNet
from .unet.call import UNetCall
from .unet.foreign import Habits
from .unet.layout import UNetLayout, UnsupportedUNet
from .verify import CannotJudge, Disagreement, first_line, judge

if TYPE_CHECKING:
    from .hosts.webui import WebUI

log = logging.getLogger("onediff")

HostForward = Callable[[], Tensor]
SECONDS_A_PAGE_WAITS = 0.05


class Declined(Exception):
    """We do not serve this call; the message is the reason, in one line for the user."""


class Accelerator:
    """Routes the calls of every UNet that a host has handed over."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.table = ShapeTable()
        self.journal = Journal()
        self.history = History()
        self._care: weakref.WeakKeyDictionary[nn.Module, Care] = weakref.WeakKeyDictionary()
        self._run_settings: Settings | None = None
        self._why_off = ""
        self._graphs = GraphCache(self.table, self._care)
        self._lock = threading.RLock()
        # The adapter of the WebUI that we run in: it must outlive a reload of the scripts.
        self.webui: WebUI | None = None

    # --- what hosts say -------------------------------------------------------------------------------------------

    def configure(self, settings: Settings) -> None:
        """Use these settings from the next UNet call on."""
        self.settings = settings

    @contextlib.contextmanager
    def settings_for_run(self, settings: Settings, why_off: str = "") -> Iterator[None]:
        """Use other settings for the calls made inside. why_off: the reason to show if they switch OneDiff off."""
        before = self._run_settings, self._why_off
        self._run_settings, self._why_off = settings, why_off
        try:
            yield
        finally:
            self._run_settings, self._why_off = before

    def adopt(self, unet: nn.Module, settings: Settings | None = None, habits: Habits = Habits()) -> None:  # noqa: B008
        """Take a UNet into care; nothing of it changes before its first call. settings override the runtime's own."""
        with self._lock:
            known = self._care.get(unet)
            if known is None:
                self._care[unet] = Care(unet, settings, habits)
            else:
                known.settings = settings

    def layout_of(self, unet: nn.Module) -> UNetLayout:
        """The layout of a UNet in our care. Raises UnsupportedUNet with the reason."""
        care = self._care.get(unet)
        if care is None:
            raise UnsupportedUNet("this UNet was not handed to OneDiff")
        with self._lock:
            return care.bound.layout_now()

    def care_of(self, unet: nn.Module) -> Care | None:
        """What is kept for a UNet, or None if it was not handed over."""
        return self._care.get(unet)

    def release(self, unet: nn.Module) -> None:
        """Give a UNet back as it was: ordinary parameters with the same values, and no memory of ours."""
        with self._lock:
            care = self._care.pop(unet, None)
            if care is not None:
                care.drop_runners()
                care.bound.release()

    def release_all(self) -> None:
        """Give every UNet back."""
        for unet in list(self._care):
            self.release(unet)

    def begin_sampling(self, unet: nn.Module) -> None:
        """A host that hands over a new context tensor at every call announces each sampling here."""
        care = self._care.get(unet)
        if care is not None:
            care.by_content = True
            care.bound.begin_sampling()

    # --- one call -------------------------------------------------------------------------------------------------

    def run(self, unet: nn.Module, call: UNetCall, host: HostForward) -> Tensor:
        """The UNet's output for a call, by the fastest exact route; host() is the host's own forward of the same call.

        Never raises for a reason of ours: what we cannot serve, the host serves, and status() says why.
        """
        try:
            return self._run(unet, call, host)
        finally:
            care = self._care.get(unet)
            if care is not None:
                care.bound.rest()

    def _run(self, unet: nn.Module, call: UNetCall, host: HostForward) -> Tensor:
        self.journal.begin()
        try:
            with self._lock:
                care, settings = self.care_for(unet)
                entry = self._entry_for(care, call)
                with our_modes(call.latent.device):
                    output, route, reason = self._serve(care, entry, settings, call)
            if entry.state is State.COLD:
                # Outside our modes: the host's forward must run exactly as the host would run it.
                self._prove(entry, output, settings, host)
        except (Declined, UnsupportedUNet, CannotJudge) as refusal:
            return self._decline(str(refusal), host)
        except torch.cuda.OutOfMemoryError:
            self.free_graphs()
            return self._decline("out of GPU memory: the graphs were freed", host)
        except Exception as error:
            # A fault of ours must not cost the user a picture.
            log.exception("a fault of ours")
            return self._decline(f"a fault of ours, please report it: {first_line(error)}", host)
        self.journal.note(route, reason)
        return output

    def _decline(self, reason: str, host: HostForward) -> Tensor:
        """Run the host's forward, with the reason for the user."""
        self.journal.note(HOST, reason)
        return host()

    def note_host(self, reason: str) -> None:
        """Take down that a host runs a call of which we know nothing, and why."""
        self.journal.begin()
        self.journal.note(HOST, reason)

    def care_for(self, unet: nn.Module) -> tuple[Care, Settings]:
        """What is kept for a UNet, and the settings that hold now. Raises Declined where nothing of ours may run."""
        care = self._care.get(unet)
        if care is None:
            raise Declined("this UNet was not handed to OneDiff")
        settings = self._run_settings or care.settings or self.settings
        if not settings.enabled:
            raise Declined(self._why_off or "OneDiff is switched off")
        if torch.is_grad_enabled():
            raise Declined("gradients are being recorded (training?)")
        return care, settings

    def _entry_for(self, care: Care, call: UNetCall) -> Entry:
        bound = care.bound
        bound.refresh(call, care.by_content)
        self.journal.model = bound.layout.model_name
        refuse_inputs(bound, call)
        entry = self.table.entry(ShapeKey.of(bound.architecture, bound.binding.dtype, call), bound.layout.model_name)
        self.journal.entry = entry
        if entry.state is State.FAILED:
            raise Declined(entry.reason)
        return entry

    def _serve(self, care: Care, entry: Entry, settings: Settings, call: UNetCall) -> tuple[Tensor, str, str]:
        """(output, route, reason why it is not a faster one)."""
        device = call.latent.device
        backend, why_not_graph = backends.choose(settings.backend, device)
        self.journal.backend = backend
        try:
            conditioning = care.bound.conditioning(torch_ops, call, care.by_content)
            if backend == "cudagraph" and entry.state is not State.COLD and not entry.no_graph:
                runner = self._graphs.runner(care, entry, settings, call, conditioning)
                if runner is not None:
                    return entry.own.time(device, lambda: runner.run(call)), GRAPH, ""
            stopwatch = Stopwatch() if entry.state is State.COLD else entry.own
            output = stopwatch.time(device, lambda: eager.run(care.bound.binding, torch_ops, call, conditioning))
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            entry.fail(f"our forward failed: {first_line(error)}")
            log.exception("%s (%s)", entry.reason, entry.key)
            raise Declined(entry.reason) from error
        if backend == "cudagraph":
            why_not_graph = entry.no_graph or "first call at this shape: the graph is captured at the next"
        return output, PLAIN, why_not_graph

    @staticmethod
    def _prove(entry: Entry, output: Tensor, settings: Settings, host: HostForward) -> None:
        if settings.verify:
            try:
                judge(entry, output, host)
            except Disagreement as miss:
                entry.fail(str(miss))
                raise Declined(entry.reason) from miss
            log.debug("checked %s: relative error %.1e", entry.key, entry.relative_error)
        entry.state = State.PROVED

    # --- what users ask -------------------------------------------------------------------------------------------

    def free_graphs(self) -> None:
        """Drop every graph and hand the memory back to the driver; the next call at a shape captures again."""
        with self._lock:
            self._graphs.free()

    def purge(self, resolutions: Collection[str] | None = None) -> int:
        """Forget these resolutions ("512x512"), or all: graphs, verdicts, timings, and what is on the disk.

        Returns the bytes of GPU memory that were given back.
        """
        with self._lock:
            freed = self._graphs.forget(resolutions)
        self.history.forget(resolutions)
        return freed

    def keep_history(self) -> None:
        """Remember on the disk what was used; call it between pictures."""
        with self._lock:
            entries = self.table.entries()
        self.history.keep(entries)

    def rows(self) -> list[ResolutionRow]:
        """What is known about every resolution, the last used first."""
        # A page must not wait for a UNet call, which holds the lock.
        if self._lock.acquire(timeout=SECONDS_A_PAGE_WAITS):
            try:
                self._graphs.note_lost()
            finally:
                self._lock.release()
        return rows_of(self.table.entries(), self.history.rows())

    def status(self) -> dict[str, Any]:
        """What the last call was, by which route it went and why, as plain values for a page or JSON; see Journal."""
        settings = self._run_settings or self.settings
        status = self.journal.status()
        return {"enabled": settings.enabled, **status, "backend": status["backend"] or settings.backend}


def refuse_inputs(bound: BoundUNet, call: UNetCall, y_is_embedded: bool = False) -> None:
    """Raise Declined for inputs that do not fit the bound UNet. y_is_embedded: see layout_fits."""
    misfit = layout_fits(bound.layout, call, y_is_embedded)
    if misfit:
        raise Declined(misfit)
    if call.latent.device != bound.binding.device:
        raise Declined(f"the UNet's weights are on {bound.binding.device}, the latent is on {call.latent.device}")
    if call.latent.dtype != bound.binding.dtype:
        raise Declined(f"the UNet's weights are {bound.binding.dtype}, the latent is {call.latent.dtype}")
    autocast = autocast_dtype(call.latent.device.type)
    if autocast not in (None, bound.binding.dtype):
        raise Declined(f"autocast to {autocast} is on, but the UNet's weights are {bound.binding.dtype}")


runtime = Accelerator()

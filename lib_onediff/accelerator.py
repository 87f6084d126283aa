"""The one runtime object: takes a UNet call, picks the route, runs it, and says why."""
from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from . import backends
from .backends import eager
from .backends.base import Runner
from .backends.cudagraph import CudaGraphs
from .ops import torch_ops
from .settings import Settings
from .shapes.key import ShapeKey, layout_fits
from .shapes.table import Entry, ShapeTable, State
from .shapes.timing import Stopwatch
from .unet.bound import BoundUNet
from .unet.call import UNetCall
from .unet.forward import Conditioning
from .unet.layout import UnsupportedUNet
from .verify import CannotJudge, Disagreement, judge

log = logging.getLogger("onediff")

GRAPH, PLAIN, HOST = "graph", "plain", "host"
# Older torch raises when asked for autocast on another kind of device, such as mps.
AUTOCAST_DEVICES = ("cuda", "cpu")
HostForward = Callable[[], Tensor]


class Declined(Exception):
    """We do not serve this call; the message is the reason, in one line for the user."""


class Care:
    """What the runtime keeps for one UNet module: the bound module, its own settings, and its graphs."""

    def __init__(self, unet: nn.Module, settings: Settings | None, trusted: Collection[str]) -> None:
        self.settings = settings
        self.bound = BoundUNet(unet, trusted)
        self.by_content = False
        self._runners: dict[ShapeKey, tuple[int, Conditioning, Runner]] = {}

    def runner(self, key: ShapeKey, conditioning: Conditioning) -> Runner | None:
        """The runner for a shape, unless weights or conditioning have moved since it was made."""
        generation, held, runner = self._runners.get(key, (None, None, None))
        if runner is not None and generation == self.bound.generation and held is conditioning:
            return runner
        self._runners.pop(key, None)
        return None

    def keep(self, key: ShapeKey, conditioning: Conditioning, runner: Runner) -> None:
        self._runners = {
            kept: entry for kept, entry in self._runners.items() if entry[0] == self.bound.generation
        }
        self._runners[key] = (self.bound.generation, conditioning, runner)

    def drop_runners(self) -> None:
        self._runners.clear()


class Accelerator:
    """Routes the calls of every UNet that a host has handed over."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.table = ShapeTable()
        self._care: weakref.WeakKeyDictionary[nn.Module, Care] = weakref.WeakKeyDictionary()
        self._run_settings: Settings | None = None
        self._graphs = CudaGraphs()
        self._lock = threading.RLock()
        self._last: dict[str, Any] = {"route": None, "reason": "no picture has been made yet"}
        self._calls: Counter[str] = Counter()

    # --- what hosts say -------------------------------------------------------------------------------------------

    def configure(self, settings: Settings) -> None:
        """Use these settings from the next UNet call on."""
        self.settings = settings

    @contextlib.contextmanager
    def settings_for_run(self, settings: Settings) -> Iterator[None]:
        """Use other settings for the calls made inside."""
        before, self._run_settings = self._run_settings, settings
        try:
            yield
        finally:
            self._run_settings = before

    def adopt(self, unet: nn.Module, settings: Settings | None = None, trusted: Collection[str] = ()) -> None:
        """Take a UNet into care; nothing of it changes before its first call. settings override the runtime's own.

        trusted: Python modules whose class-level patches the host adapter knows and handles.
        """
        with self._lock:
            known = self._care.get(unet)
            if known is None:
                self._care[unet] = Care(unet, settings, trusted)
            else:
                known.settings = settings

    def release(self, unet: nn.Module) -> None:
        """Give a UNet back as it was: ordinary parameters with the same values, and no memory of ours."""
        with self._lock:
            care = self._care.pop(unet, None)
            if care is not None:
                care.drop_runners()
                care.bound.release()

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
        self._last.update(entry=None)
        try:
            care, settings = self._care_for(unet)
            with self._lock:
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
            log.exception("OneDiff: a fault of ours")
            return self._decline(f"a fault of ours, please report it: {first_line(error)}", host)
        self._note(route, reason)
        return output

    def _decline(self, reason: str, host: HostForward) -> Tensor:
        """Run the host's forward, with the reason for the user."""
        self._note(HOST, reason)
        return host()

    def note_host(self, reason: str) -> None:
        """Take down that a host runs a call of which we know nothing, and why."""
        self._last.update(entry=None, model=None)
        self._note(HOST, reason)

    def _care_for(self, unet: nn.Module) -> tuple[Care, Settings]:
        care = self._care.get(unet)
        if care is None:
            raise Declined("this UNet was not handed to OneDiff")
        settings = self._run_settings or care.settings or self.settings
        if not settings.enabled:
            raise Declined("OneDiff is switched off")
        if torch.is_grad_enabled():
            raise Declined("gradients are being recorded (training?)")
        return care, settings

    def _entry_for(self, care: Care, call: UNetCall) -> Entry:
        bound = care.bound
        self._last.update(model=None)
        bound.refresh(call, care.by_content)
        self._last.update(model=bound.layout.model_name)
        refuse_inputs(bound, call)
        entry = self.table.entry(ShapeKey.of(bound.architecture, bound.binding.dtype, call))
        self._last.update(entry=entry)
        if entry.state is State.FAILED:
            raise Declined(entry.reason)
        return entry

    def _serve(self, care: Care, entry: Entry, settings: Settings, call: UNetCall) -> tuple[Tensor, str, str]:
        """(output, route, reason why it is not a faster one)."""
        device = call.latent.device
        backend, why_not_graph = backends.choose(settings.backend, device)
        self._last.update(backend=backend)
        try:
            conditioning = care.bound.conditioning(torch_ops, call, care.by_content)
            if backend == "cudagraph" and entry.state is not State.COLD and not entry.no_graph:
                runner = self._runner(care, entry, call, conditioning)
                if runner is not None:
                    return entry.own.time(device, lambda: runner.run(call)), GRAPH, ""
            stopwatch = Stopwatch() if entry.state is State.COLD else entry.own
            output = stopwatch.time(device, lambda: eager.run(care.bound.binding, torch_ops, call, conditioning))
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            entry.fail(f"our forward failed: {first_line(error)}")
            log.exception("OneDiff: %s (%s)", entry.reason, entry.key)
            raise Declined(entry.reason) from error
        if backend == "cudagraph":
            why_not_graph = entry.no_graph or "first call at this shape: the graph is captured at the next"
        return output, PLAIN, why_not_graph

    def _runner(self, care: Care, entry: Entry, call: UNetCall, conditioning: Conditioning) -> Runner | None:
        """The shape's graph, captured if need be; None where it cannot be captured (entry.no_graph says why)."""
        runner = care.runner(entry.key, conditioning)
        if runner is None:
            try:
                runner = self._graphs.prepare(care.bound.binding, torch_ops, call, conditioning)
            except torch.cuda.OutOfMemoryError:
                raise
            except RuntimeError as error:
                entry.no_graph = f"the graph could not be captured: {first_line(error)}"
                log.exception("OneDiff: %s (%s)", entry.no_graph, entry.key)
                return None
            care.keep(entry.key, conditioning, runner)
            entry.state = State.READY
        return runner

    @staticmethod
    def _prove(entry: Entry, output: Tensor, settings: Settings, host: HostForward) -> None:
        if settings.verify:
            try:
                judge(entry, output, host)
            except Disagreement as miss:
                entry.fail(str(miss))
                raise Declined(entry.reason) from miss
        entry.state = State.PROVED

    def _note(self, route: str, reason: str) -> None:
        self._calls[route] += 1
        if (route, reason) != (self._last.get("route"), self._last.get("reason")):
            log.info("OneDiff: %s route%s", route, f" ({reason})" if reason else "")
        self._last.update(route=route, reason=reason)

    # --- what users ask -------------------------------------------------------------------------------------------

    def free_graphs(self) -> None:
        """Drop every graph and hand the memory back to the driver; the next call at a shape captures again."""
        with self._lock:
            for care in self._care.values():
                care.drop_runners()
            self._graphs.forget_pools()
            for entry in self.table.entries():
                if entry.state is State.READY:
                    entry.state = State.PROVED
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def status(self) -> dict[str, Any]:
        """What the last call was, by which route it went and why, as plain values for a page or JSON.

        step_ms and host_ms are medians at the last call's shape, in milliseconds; ratio is host_ms / step_ms.
        """
        entry: Entry | None = self._last.get("entry")
        settings = self._run_settings or self.settings
        return {
            "enabled": settings.enabled,
            "model": self._last.get("model"),
            "backend": self._last.get("backend", settings.backend),
            "resolution": entry.key.resolution if entry else None,
            "route": self._last["route"],
            "reason": self._last["reason"],
            "step_ms": entry.own.median_ms if entry else None,
            "host_ms": entry.host.median_ms if entry else None,
            "ratio": entry.ratio if entry else None,
            "relative_error": entry.relative_error if entry else None,
            "calls": {route: self._calls[route] for route in (GRAPH, PLAIN, HOST)},
        }


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What torch.autocast casts to on this kind of device now; None where it is off."""
    if device_type not in AUTOCAST_DEVICES:
        return None
    if hasattr(torch, "get_autocast_dtype"):
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    if device_type == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


@contextlib.contextmanager
def our_modes(device: torch.device) -> Iterator[None]:
    """Ordinary tensors, no gradients, no autocast: what our forward and its captures are written for."""
    autocasts = device.type in AUTOCAST_DEVICES
    no_autocast = torch.autocast(device.type, enabled=False) if autocasts else contextlib.nullcontext()
    with torch.inference_mode(False), torch.no_grad(), no_autocast:
        yield


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def refuse_inputs(bound: BoundUNet, call: UNetCall) -> None:
    """Raise Declined for inputs that do not fit the bound UNet."""
    misfit = layout_fits(bound.layout, call)
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

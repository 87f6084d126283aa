"""Serves a call by the best backend that can: what fails is taken down with its reason, and the next one is tried."""
from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import backends
from .backends import eager
from .care import Care
from .graph_cache import GraphCache
from .journal import GRAPH, PLAIN
from .modes import autocast_dtype
from .operators import Network, OperatorSets
from .precision import Flags
from .settings import Settings
from .shapes.history import History
from .shapes.key import ShapeKey, layout_fits
from .shapes.table import Entry, ShapeTable, State
from .shapes.timing import Stopwatch
from .unet.bound import BoundUNet
from .unet.call import UNetCall
from .unet.forward import Conditioning
from .verify import CannotJudge, Disagreement, first_line, judge, recall

log = logging.getLogger("onediff")
COMPILING = "OneDiff's kernels are being compiled, in the background; on this machine it is done once"


class Declined(Exception):
    """We do not serve this call; the message is the reason, in one line for the user."""


class Served(NamedTuple):
    """An output, and what is needed to go on from there. reason: why it did not go by a faster route."""

    output: Tensor
    entry: Entry
    route: str
    reason: str
    conditioning: Conditioning


class Ladder:
    """The backends of a device, from the best down to PyTorch's operators launched one by one."""

    def __init__(self, table: ShapeTable, graphs: GraphCache, operators: OperatorSets) -> None:
        self._table = table
        self._graphs = graphs
        self._operators = operators
        # Whether a call waits for kernels that are being compiled, and is not the host's meanwhile.
        self.patient = False

    def begin(self, care: Care, settings: Settings, call: UNetCall) -> backends.Steps:
        """The backends to try for a call, with the binding made true for it.

        Raises Declined, and UnsupportedUNet. To be called in the host's modes: they decide what can be served.
        """
        steps = backends.steps(settings.backend, call.latent.device, self._operators.why_not_native)
        care.bound.refresh(call, care.by_content, channels_last=steps.backends[0] == backends.NATIVE)
        refuse_inputs(care.bound, call)
        return steps

    def serve(
        self, care: Care, steps: backends.Steps, call: UNetCall, notice: Callable[[Entry], None], flags: Flags = ()
    ) -> Served:
        """The output by the first backend that does not fail. notice: told of every entry that is tried. flags: torch's
        switches of precision, as they stand; the entry's key holds them.

        Raises Declined with the reason of the last, and torch.cuda.OutOfMemoryError.
        """
        reason = steps.reason
        for backend in steps.backends:
            entry = self._entry(care, call, backend, flags)
            notice(entry)
            if entry.state is not State.FAILED:
                try:
                    self._have_kernels(care, backend, call)
                    return self._run(care, entry, call, reason)
                except (torch.cuda.OutOfMemoryError, Declined):
                    raise
                except Exception as error:
                    entry.fail(blame(backend, f"our forward failed: {first_line(error)}"))
                    log.exception("%s (%s)", entry.reason, entry.key)
            reason = entry.reason
        raise Declined(reason)

    def prove(self, served: Served, settings: Settings, history: History, host: Callable[[], Tensor]) -> None:
        """Compare a first output with the host's, unless that was done on this machine before.

        Raises Declined if they differ, and CannotJudge.
        """
        entry, backend = served.entry, served.entry.key.backend
        if not recall(entry, history) and settings.verify:
            try:
                judge(entry, served.output, host)
            except CannotJudge as reason:
                if not bool(torch.isfinite(served.output).all()):
                    raise
                # The host would make a black picture, and we need not.
                log.warning("OneDiff's output is used unchecked, because %s.", reason)
                entry.state = State.PROVED
                return
            except Disagreement as miss:
                entry.fail(blame(backend, str(miss)))
                raise Declined(entry.reason) from miss
            log.debug("checked %s: relative error %.1e", entry.key, entry.relative_error)
            history.keep_verdict(backend, entry.key, entry.relative_error)
        entry.state = State.PROVED

    def make_ready(self, care: Care, settings: Settings, call: UNetCall, served: Served) -> None:
        """Capture the graph of a shape that was just served without one; the call itself has been answered.

        Raises nothing: what stands in the way is noted in the entry.
        """
        entry, backend = served.entry, served.entry.key.backend
        wants_graph = backend in backends.WITH_GRAPHS and served.route == PLAIN and not entry.no_graph
        if not wants_graph or entry.state is State.COLD:
            return
        try:
            if backend == backends.NATIVE and self._operators.tune(care.bound.layout, call):
                # Another implementation of attention was chosen: let it do its first work outside the capture.
                self._plainly(care, entry, call, served.conditioning)
            self._graphs.capture(care, entry, settings.memory_budget, call, served.conditioning)
        except torch.cuda.OutOfMemoryError:
            self._graphs.free()
            entry.no_graph = "out of GPU memory while its graph was captured: the other graphs were freed"
        except Exception as error:
            entry.no_graph = f"the graph could not be captured: {first_line(error)}"
            log.exception("%s (%s)", entry.no_graph, entry.key)

    def _entry(self, care: Care, call: UNetCall, backend: str, flags: Flags) -> Entry:
        bound = care.bound
        key = ShapeKey.of(bound.architecture, bound.binding.dtype, call, backend, flags)
        return self._table.entry(key, bound.layout.model_name)

    def _have_kernels(self, care: Care, backend: str, call: UNetCall) -> None:
        if backend != backends.NATIVE:
            return
        network = network_of(care, call)
        if not self._operators.prepare(network, self.patient):
            raise Declined(COMPILING)
        if self.patient:
            # Before the first use is checked, so that what is checked is what will run.
            self._operators.tune_kernels(network)

    def _run(self, care: Care, entry: Entry, call: UNetCall, reason: str) -> Served:
        backend, device = entry.key.backend, call.latent.device
        # The context's keys and values are plain GEMMs: no operator of ours would make them otherwise.
        conditioning = care.bound.conditioning(
            self._operators.of(backends.EAGER), call, care.by_content, entry.key.precision
        )
        runner = care.runner(entry.key, conditioning)
        if runner is not None and entry.state is not State.COLD:
            output = entry.own.time(device, lambda: runner.run(call))
            return Served(output, entry, GRAPH, reason, conditioning)
        stopwatch = Stopwatch() if entry.state is State.COLD else entry.own
        plainly = lambda: self._plainly(care, entry, call, conditioning)  # noqa: E731
        # A first call of all chooses algorithms, and takes more memory for that than any later one.
        measures = backend in backends.WITH_GRAPHS and entry.state is not State.COLD
        output = stopwatch.time(device, lambda: self._graphs.measured(entry, plainly) if measures else plainly())
        if backend in backends.WITH_GRAPHS:
            reason = reason or entry.no_graph or entry.waits or (
                "first call at this shape" if entry.state is State.COLD else "its graph is captured after this step"
            )
        return Served(output, entry, PLAIN, reason, conditioning)

    def _plainly(self, care: Care, entry: Entry, call: UNetCall, conditioning: Conditioning) -> Tensor:
        return eager.run(care.bound.binding, self._operators.of(entry.key.backend), call, conditioning)


def network_of(care: Care, call: UNetCall) -> Network:
    return Network(care.bound.architecture, care.bound.kernel_users, call.latent.dtype, call.latent.device)


def blame(backend: str, what: str) -> str:
    """What went wrong, with the backend's name where another one may do better."""
    return what if backend == backends.EAGER else f"{what} (backend {backend})"


def refuse_inputs(bound: BoundUNet, call: UNetCall, y_is_embedded: bool = False) -> None:
    """Raise Declined for inputs that do not fit the bound UNet. y_is_embedded: see layout_fits."""
    binding = bound.binding
    misfit = layout_fits(bound.layout, call, y_is_embedded)
    if misfit:
        raise Declined(misfit)
    if call.latent.device != binding.device:
        raise Declined(f"the UNet's weights are on {binding.device}, the latent is on {call.latent.device}")
    if call.latent.dtype != binding.dtype:
        raise Declined(f"the UNet's weights are {binding.dtype}, the latent is {call.latent.dtype}")
    autocast = autocast_dtype(call.latent.device.type)
    if autocast not in (None, binding.dtype):
        raise Declined(f"autocast to {autocast} is on, but the UNet's weights are {binding.dtype}")

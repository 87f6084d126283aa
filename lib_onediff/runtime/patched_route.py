"""Serves calls with functions of other extensions in them: by CUDA graphs of the parts between the functions, or
operator by operator."""
from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from ..core.attempt import HostError
from ..core.call import Call
from ..core.guard import first_line
from ..core.image import GRAPH, PLAIN
from ..core.points import DoesNotFit, PassedPoint, ResumedPoints
from ..core.policy import Served
from ..core.refusal import Refusal
from ..core.table import Entry, State
from .function_calls import FunctionCalls
from .network import Network
from .rounding import no_question
from .services import Services
from .verify import computed_twice, relative_error, rewinder_of_all

log = logging.getLogger("onediff")
# After so many captures whose graphs did not fit later calls, a shape gets no graph any more: a function may return
# other shapes at some steps of a sampling.
MOST_MISFITS = 4
WITHIN_FUNCTION = "another extension's function inside the UNet calls the UNet again"


class PatchedRoute:
    """Serves patched calls. Callers hold the runtime's lock."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._graphs = services.graphs
        self._devices = services.devices

    def run(
        self, network: Network, entry: Entry, call: Call, functions: FunctionCalls,
        plainly: Callable[[Call], Tensor], why_not_better: str = "",
    ) -> Served:
        """The output of a patched call. Raises Refusal if this backend does not serve it.

        functions: the call's patch points. plainly: computes a call operator by operator. why_not_better: why the
        backend before did not serve it.
        """
        names = ", ".join(entry.key.patches)
        device = call.latent.device
        guarded = replace(call, patches=functions)
        within = f"other extensions compute within the network: {names}"
        reason = "; ".join(filter(None, (within, why_not_better)))
        traits = self._devices.named(entry.key.backend).traits
        # Graphs of parts do not support streamed weights: a graph's copies cannot continue during the next graph.
        streams = network.bound.streaming is not None
        if streams and not traits.launches_patched:
            raise Refusal("an extension runs functions inside the UNet, and a part of its weights is in main memory")
        if entry.state is State.COLD:
            output = self._first(entry, guarded, functions, plainly, names)
            return Served(output, entry, network.bound.refreshed, PLAIN, reason, call)
        if not traits.has_graphs or streams:
            output = entry.own.time(device, lambda: plainly(guarded), PLAIN)
            return Served(output, entry, network.bound.refreshed, PLAIN, reason, call)
        replayed = self._replayed(network, entry, guarded, functions)
        if isinstance(replayed, Tensor):
            return Served(replayed, entry, network.bound.refreshed, GRAPH, reason, call)
        if entry.no_graph and not traits.launches_patched and not replayed:
            # Without a graph, PyTorch's own operators launch faster.
            raise Refusal(entry.no_graph)
        reason = "; ".join(filter(None, (reason, entry.no_graph or entry.waits)))
        resumed = replace(call, patches=ResumedPoints(functions, replayed)) if replayed else guarded
        output = entry.own.time(device, lambda: self._graphs.measured(entry, lambda: plainly(resumed)), PLAIN)
        rewind = None if entry.no_graph else functions.rewind
        return Served(output, entry, network.bound.refreshed, PLAIN, reason, call, rewind)

    def _first(
        self, entry: Entry, call: Call, functions: FunctionCalls, plainly: Callable[[Call], Tensor], names: str
    ) -> Tensor:
        """The output at a shape's first call, computed twice to see whether the functions repeat themselves. Raises
        Refusal if they do not, or fail."""
        try:
            output = computed_twice(entry, lambda: plainly(call), functions.functions)
        except HostError as passing:
            if passing.is_out_of_memory or not isinstance(passing.error, Exception):
                raise
            # The host's forward calls the function next. If it fails there too, the host raises its exception.
            what = f"an extension's function failed inside of OneDiff's UNet: {first_line(passing.error)} ({names})"
            raise Refusal(entry.blame(what, is_final=False)) from None
        if output is None:
            what = f"an extension's function computes something else each time, although nothing changed ({names})"
            raise Refusal(entry.blame(what))
        return output

    def _replayed(
        self, network: Network, entry: Entry, call: Call, functions: FunctionCalls
    ) -> Tensor | list[PassedPoint]:
        """The output by graphs. Without fitting graphs, a list instead: the points that the replay has passed; empty if
        there was no replay, or all functions must be called again."""
        runner = network.runner(entry.key)
        if runner is None:
            return []
        self._services.is_between_graphs = True
        try:
            return entry.own.time(call.latent.device, lambda: runner.run(call), GRAPH)
        except DoesNotFit as misfit:
            log.debug("%s (%s)", misfit, entry.key, exc_info=True)
            passed = misfit.passed
            why = str(misfit)
        finally:
            self._services.is_between_graphs = False
        entry.misfits += 1
        if entry.misfits >= MOST_MISFITS:
            entry.no_graph = why
        self._graphs.drop({entry.key})
        if passed is None:
            functions.rewind()
        return passed or []

    def capture(
        self, network: Network, result: Served, rewind: Callable[[], None], capture: Callable[[], None]
    ) -> None:
        """Capture the graphs of a call that was just served without them, and compare their output with the call's.

        capture: makes the graphs, and calls the functions once more, with the state that rewind() restores. Afterwards
        the functions have the state of now. If the outputs differ, the graphs are dropped.
        """
        entry = result.entry
        call = result.call
        go_on = rewinder_of_all(entry.key.device, () if call.patches is None else call.patches.functions)
        self._services.is_between_graphs = True
        try:
            rewind()
            capture()
        finally:
            self._services.is_between_graphs = False
            go_on()
        runner = network.runner(entry.key)
        if runner is None:
            return
        error = relative_error(runner.output.nan_to_num(), result.output.nan_to_num())
        if error > no_question(entry.key.dtype, entry.key.device, entry.key.precision):
            entry.no_graph = f"an extension's functions gave a different result inside CUDA graphs (error {error:.1e})"
            self._graphs.drop({entry.key})

"""Serves patched calls: calls in whose forward functions of other extensions run, such as ControlNet's. The parts of
the forward between the functions run as CUDA graphs; without graphs, the whole forward runs operator by operator."""
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
# If a shape's graphs did not fit a later call this many times, the shape gets no graph any more: a function may return
# tensors of other shapes at some steps of a sampling.
MOST_MISFITS = 4
# The reason, for users, why such a call inside of a call is refused.
WITHIN_FUNCTION = "another extension's function inside the UNet calls the UNet again"


class PatchedRoute:
    """Serves patched calls, those with Call.patches. Callers hold the runtime's lock."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._graphs = services.graphs
        self._devices = services.devices

    def run(
        self, network: Network, entry: Entry, call: Call, functions: FunctionCalls,
        plainly: Callable[[Call], Tensor], why_not_better: str = "",
    ) -> Served:
        """The output of a patched call, by the entry's backend. A shape's first call is computed twice (see _first);
        later calls are replayed if there is a graph that fits. Raises Refusal if this backend does not serve the call.

        functions: wraps the functions in the call, and takes the place of call.patches. plainly: computes a call
        operator by operator, without a graph. why_not_better: why a faster backend did not serve the call, for users;
        "" if none was tried. Served.rewind restores the functions' state from before the call, for capture(); it is
        None if no graph is to be captured.
        """
        names = ", ".join(entry.key.patches)
        device = call.latent.device
        guarded = replace(call, patches=functions)
        within = f"other extensions compute inside the model: {names}"
        reason = "; ".join(filter(None, (within, why_not_better)))
        traits = self._devices.named(entry.key.backend).traits
        # Graphs of parts do not support streamed weights: a graph's copies cannot continue during the next graph.
        streams = network.bound.streaming is not None
        if streams and not traits.launches_patched:
            raise Refusal(
                "an extension's functions run inside the UNet, and some of the UNet's weights are in main memory"
            )
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
        """The output at a shape's first call, computed twice to see whether the functions give the same results again.
        If they give other results, or raise an exception, the entry becomes FAILED, and Refusal is raised; a lack of
        memory, and exceptions such as KeyboardInterrupt, are raised as HostError. names: the functions' extensions, for
        users."""
        try:
            output = computed_twice(entry, lambda: plainly(call), functions.functions)
        except HostError as passing:
            if passing.is_out_of_memory or not isinstance(passing.error, Exception):
                raise
            # The host's forward calls the function next. If it fails there too, the host raises its exception.
            what = f"an extension's function failed inside of OneDiff's UNet: {first_line(passing.error)} ({names})"
            raise Refusal(entry.mark_failed(what, is_final=False)) from None
        if output is None:
            what = f"an extension's function gives another result each time, although its inputs are the same ({names})"
            raise Refusal(entry.mark_failed(what))
        return output

    def _replayed(
        self, network: Network, entry: Entry, call: Call, functions: FunctionCalls
    ) -> Tensor | list[PassedPoint]:
        """The output by the shape's graphs. If there are none, or they do not fit this call's functions, returns a list
        instead: the points that the replay has passed, whose functions need not be called again; [] if there was no
        replay, or if all functions must be called again. Graphs that do not fit are dropped. If functions must be
        called again, they were put back into their state from before the call."""
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
        """Capture the graphs of a call that was just served without graphs, and compare the graphs' output with the
        call's. If the outputs differ by more than rounding, the graphs are dropped, and entry.no_graph has the reason.
        Compares nothing if the capture has made no graphs.

        result: the result of run(). rewind: restores the functions' state from before the call. capture: makes the
        graphs, which calls the functions once more. Afterwards, also after an exception, the functions have the state
        again that they have now.
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

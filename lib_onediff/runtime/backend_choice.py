"""Chooses the backends to try for a call, and the layers that are computed in eight bits (the option Low-bit).

A layer is computed in eight bits if that is faster, and if its class of layers (LowBitLayer.layer_class: all
convolutions, or all linear layers with one role) keeps this checkpoint within the user's error budget. The error of a
class is measured once, in calls of the user's own image: the output with this class alone in eight bits, and the output
with all chosen classes, each compared with the exact output of the same call.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..core.attempt import Attempt, Outcome, attempted
from ..core.call import Call
from ..core.device import Candidates
from ..core.guard import first_line
from ..core.key import Lossy
from ..core.refusal import Refusal
from ..core.sampling import time_of
from ..core.settings import MOST_LOW_BIT_ERROR, Settings
from ..core.table import Entry
from ..weights.low_bit import KINDS_OF, WantedKinds
from ..weights.streaming import RING
from .low_bit_errors import TOGETHER, Choice, half_of
from .network import Network
from .services import Services
from .verify import relative_error

log = logging.getLogger("onediff")
# Reasons, for users, why a call is not computed with 8-bit weights, or not with "Low-bit only".
NO_ROOM = "Low-bit is inactive: there is not enough GPU memory for the 8-bit weights, or to measure their error"
NONE_IN_MAIN_MEMORY = "Low-bit only is inactive: the whole model is on the GPU, and no part of it in main memory"
CHANGES_AT_EACH_CALL = (
    "Low-bit is inactive: an extension changes the model's weights on the fly, perhaps at each step"
)
TOO_LATE = (
    "Low-bit is inactive in this step: its error with this checkpoint has not been measured yet, and the last steps of "
    "an image are too late for that"
)
NOT_FINITE = (
    "Low-bit is inactive in this step: the exact output, with which it is compared, has NaN or infinite values; if the "
    "image is black, the model needs float32 (in a WebUI: --no-half)"
)


Result = TypeVar("Result")


@dataclass(frozen=True)
class Candidate(Generic[Result]):
    """A backend that may serve a call or a decode, with or without lossy products. entry and serve raise Refusal if
    this backend cannot serve it, so that the next candidate is tried.

    entry: returns the entry of the shape with this backend.
    serve: serve(entry, reason) returns the result. reason: why the candidates before this one did not serve, for users:
        the last fault, else the last refusal; for the first candidate, the reason given to first_to_serve, or "".
    """

    entry: Callable[[], Entry]
    serve: Callable[[Entry, str], Result]


def first_to_serve(
    candidates: Iterable[Candidate[Result]], reason: str, sampling: int | None = None,
    after_failure: Callable[[Attempt[Any]], object] = lambda failed: None,
) -> Result:
    """The result of the first candidate that neither refuses nor fails. If a candidate's serve() fails by a fault of
    ours, the fault is logged, the candidate's entry is marked as failed, and the next candidate is tried.

    candidates: the fastest first. reason: why a faster backend is not among them, for users; "" if none is missing.
    sampling: the number of the sampling in progress; see Entry.mark_failed. after_failure: called with the failed
    attempt after each refusal or fault of a candidate's serve(), but not after a refusal of its entry().

    If no candidate serves, raises Refusal with the last fault's reason, else with the last refusal's. Raises
    torch.cuda.OutOfMemoryError and HostError at once, and a fault in a candidate's entry().
    """
    # A later refusal may only be due to the fault, and must not hide its reason.
    has_failed = False
    for candidate in candidates:
        admitted = attempted(candidate.entry)
        if admitted.outcome is Outcome.REFUSED:
            reason = reason if has_failed else admitted.reason
            continue
        entry = admitted.given()
        made = attempted(partial(candidate.serve, entry, reason))
        if made.is_ours or made.outcome is Outcome.OUT_OF_MEMORY:
            return made.given()
        reason = reason if has_failed else made.reason
        if made.fault is not None:
            has_failed = True
            failure = f"OneDiff's computation failed: {first_line(made.fault)}"
            reason = entry.mark_failed(failure, sampling, is_final=False)
            log.error("%s (%s)", entry.reason, entry.key, exc_info=made.fault)
        after_failure(made)
    raise Refusal(reason)


class BackendChoice:
    """Updates a network's binding for a call, and chooses the backends to try. Callers must hold the runtime's lock
    (Services.computing)."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._graphs = services.graphs
        self._devices = services.devices

    def begin(self, network: Network, settings: Settings, call: Call) -> Candidates:
        """Update the network's binding for a call, and return the backends to try, with the 8-bit variants of the first
        one if the option Low-bit is on. If Low-bit is on but has no effect, Candidates.reason says why. Drops all 8-bit
        weights if the option is off, if the host changes weights on the fly, or if the model's file has low-bit
        weights.

        Raises Refusal if the host must compute the call. Call it outside of our_modes(), because the host's autocast
        and gradient modes decide whether a call can be served.
        """
        device = call.latent.device
        budget = settings.memory_budget
        candidates = self._devices.candidates(settings, device, call.latent.dtype, self._services.is_warm_up)
        network.bound.reader = self._devices.contents_reader(device)
        network.bound.refresh(
            call, candidates.devices[0].traits.channels_last, lambda: self._services.holdings.room(budget, device)
        )
        network.refuse_call(call)
        applied = network.bound.on_the_fly.applied
        if settings.low_bit == "off":
            if network.low_bit is not None:
                self._graphs.drop_low_bit(network)
            network.low_bit_choice = None
        elif applied is not None and not applied.lasting:
            self._graphs.drop_low_bit(network)
            candidates = candidates._replace(reason=CHANGES_AT_EACH_CALL)
        elif network.bound.binding.layers.formats:
            # Weights that a file stores in few bits are not quantized a second time: the errors would add up.
            self._graphs.drop_low_bit(network)
            formats = ", ".join(network.bound.binding.layers.format_names())
            candidates = candidates._replace(
                reason=f"Low-bit is inactive: the checkpoint file has {formats} weights already"
            )
        else:
            candidates = self._with_low_bit(network, settings, call, candidates)
        return candidates

    def _with_low_bit(self, network: Network, settings: Settings, call: Call, found: Candidates) -> Candidates:
        """The candidates `found` with the 8-bit variants of the first backend added (Candidates.lossy).
        Candidates.reason becomes the reasons why a variant is missing, joined by "; "; "" if no variant is missing."""
        if not found.devices[0].traits.takes_lossy:
            other = found.reason or "another backend was chosen"
            return found._replace(reason=f"Low-bit needs the native backend: {other}")
        beside = Lossy(settings.low_bit)
        wanted = [beside._replace(only=True), beside] if settings.low_bit_only else [beside]
        low_bit = self._devices.lossy.low_bit
        lacks: dict[str, None] = {}
        tried: list[Lossy] = []
        for lossy in wanted:
            if lossy.only and not network.bound.binding.away:
                lack: str | None = NONE_IN_MAIN_MEMORY
            elif network.no_room_for_low_bit:
                lack = NO_ROOM
            else:
                lack = low_bit.why_not(lossy.low_bit, call.latent.device, call.latent.dtype)
                lack = lack or low_bit.why_none_here(lossy, network.bound.layout, call)
                lack = lack and f"Low-bit is inactive: {lack}"
            if lack:
                lacks[lack] = None
            else:
                tried.append(lossy)
        return found._replace(reason="; ".join(lacks), lossy=tuple(tried))


class LowBitRoute:
    """Chooses the layers of a network to compute in eight bits, measures their errors, and quantizes their weights.
    Callers must hold the runtime's lock (Services.computing).

    "8-bit weights" are those that were quantized for the option Low-bit (Network.low_bit). With the option "Low-bit
    only" (lossy.only), the GPU has 8-bit weights of layers whose 16-bit weights stay in main memory; otherwise it has
    the 8-bit and the 16-bit weights of a layer. A "choice" (Network.low_bit_choice) says which classes of layers are in
    eight bits, by their errors; there is none with "Low-bit only", which computes without a budget.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._graphs = services.graphs
        self._devices = services.devices
        self._families = services.families

    def tune(self, network: Network, lossy: Lossy, call: Call) -> bool:
        """Measure which products of a call are faster in eight bits than in 16, where that is unknown. This runs
        kernels on the GPU, and quantizes nothing. Returns whether anything was measured."""
        return self._devices.lossy.low_bit.tune(lossy, network.bound.layout, call, self._services.time_ms(call))

    def fit(
        self, network: Network, lossy: Lossy, call: Call, settings: Settings, is_first: bool = False
    ) -> None:
        """Make sure that the network has the 8-bit weights that a call needs: those of layers that are faster in eight
        bits and within the error budget; with lossy.only, those of all layers whose 8-bit weights fit on the GPU.
        Unknown errors are measured first, in this call.

        is_first: whether this is the shape's first call, which is compared with the host. In that call, tune() runs
        first, so that later calls compute the same layers in eight bits.

        Raises Refusal if no layer may be in eight bits, if the errors cannot be measured in this call, or if the GPU
        has no room. After running out of memory, the network's 8-bit weights are dropped, and refused until the next
        sampling; after a fault of ours, which is raised, they are dropped.
        """
        fitted = attempted(lambda: self._fit_or_raise(network, lossy, call, settings, is_first))
        if fitted.outcome is Outcome.OUT_OF_MEMORY:
            network.no_room_for_low_bit = True
        if fitted.fault is not None or fitted.outcome is Outcome.OUT_OF_MEMORY:
            self._graphs.drop_low_bit(network)
        if fitted.outcome is Outcome.OUT_OF_MEMORY:
            raise Refusal(NO_ROOM)
        fitted.given()

    def _fit_or_raise(
        self, network: Network, lossy: Lossy, call: Call, settings: Settings, is_first: bool
    ) -> None:
        """As fit(), but does not drop 8-bit weights after a failure, and raises torch.cuda.OutOfMemoryError too."""
        if network.no_room_for_low_bit:
            raise Refusal(NO_ROOM)
        fitting = self._fitting_layers(network, lossy, call, is_first) if lossy.only else None
        if is_first:
            self.tune(network, lossy, call)
        self._fit(network, lossy, call, settings, fitting)

    def _fit(
        self, network: Network, lossy: Lossy, call: Call, settings: Settings, fitting: Collection[str] | None
    ) -> None:
        """Quantize the layers that are wanted for a call, after dropping 8-bit weights of other settings. fitting: with
        lossy.only, the names of the layers whose 8-bit weights fit on the GPU: these are quantized, whatever their
        errors; otherwise None. Raises Refusal if no class of layers is within the budget, and what _left_out raises."""
        budget = settings.low_bit_budget
        low_bit = self._devices.lossy.low_bit
        layout = network.bound.layout
        other = network.low_bit is not None and not network.low_bit.kinds() <= set(KINDS_OF[lossy.low_bit])
        if other or (network.low_bit is not None and network.low_bit.are_alone != lossy.only):
            # The 8-bit weights of other settings.
            self._graphs.drop_low_bit(network)
        wanted = low_bit.wanted(lossy, layout, call)
        if lossy.only or budget >= MOST_LOW_BIT_ERROR or low_bit.quantizes_every_layer:
            network.low_bit_choice = None
            left_out: frozenset[str] = frozenset()
        else:
            left_out = self._left_out(network, lossy, call, budget, wanted)
        if fitting is not None:
            chosen = {name: kind for name, kind in wanted.items() if name in fitting}
            network.fit_low_bit(low_bit.quantizer(), chosen, are_alone=True)
        elif not self._quantize(network, wanted, left_out):
            raise Refusal(
                "Low-bit is inactive: with this checkpoint, every group of layers in 8 bits exceeds 'Low-bit error "
                f"budget' ({budget:g})"
            )

    def _fitting_layers(self, network: Network, lossy: Lossy, call: Call, is_first: bool) -> set[str]:
        """For the option "Low-bit only": the names of the layers that have 8-bit weights on the GPU already, and at a
        shape's first call (is_first), or while no layer has any, also of the layers in main memory whose 8-bit weights
        fit on the GPU. Layers are taken in the order of low_bit.wanted; one that does not fit is left out.

        If not all fit, the host is asked to move more 16-bit weights off the GPU. If it does, the binding is refreshed,
        and the layers are counted again, because more of them are in main memory now. Raises Refusal if none fits.
        """
        bound = network.bound
        kept = network.low_bit
        low_bit = self._devices.lossy.low_bit
        there = kept.names() if kept is not None and kept.are_alone else set[str]()
        if there and not is_first:
            return there
        wanted = low_bit.wanted(lossy, bound.layout, call)
        sizes = {
            name: sum(part.numel() for part in bound.binding.parts(name)[0])
            for name in wanted if name in bound.binding.away and name not in there
        }
        # The outputs of 8-bit layers, and the buffers for streamed weights, must fit as well.
        room = self._services.holdings.card.room(bound.binding.device) - RING
        room -= low_bit.working_bytes(lossy, bound.layout, call)
        lacking = sum(sizes.values()) - room
        # A 16-bit weight that is moved off frees two bytes per value, and its own 8-bit copy takes one of them.
        if lacking > 0 and network.make_room(2 * lacking):
            bound.refresh(call, bound.channels_last)
            return self._fitting_layers(network, lossy, call, is_first)
        fitting = set(there)
        for name, size in sizes.items():
            if size <= room:
                fitting.add(name)
                room -= size
        if not fitting:
            raise Refusal(NO_ROOM)
        return fitting

    def _left_out(
        self, network: Network, lossy: Lossy, call: Call, budget: float, wanted: WantedKinds
    ) -> frozenset[str]:
        """The classes of layers that stay in 16 bits. Unknown errors are measured first, in this call, and kept for
        this checkpoint, also on the disk; Network.low_bit_choice becomes the choice by all errors.

        budget: the largest relative error of the output. wanted: the layers that are faster in eight bits.

        Warm-ups and cached passes measure nothing and change no choice, because they are not full steps of an image:
        classes of unknown error are in eight bits then. The last steps of an image (see half_of) measure nothing
        either: they raise Refusal if a class's error is unknown. Raises Refusal too if the exact output is not finite,
        and torch.cuda.OutOfMemoryError.
        """
        layout = network.bound.layout
        low_bit = self._devices.lossy.low_bit
        dtype = call.latent.dtype
        name = f"low-bit {lossy.low_bit} errors, {network.checkpoint()}, {str(dtype).removeprefix('torch.')}"
        known = low_bit.tuning_cache.get(name)
        choice = Choice(layout.model_name, wanted, low_bit.classes(layout), budget, known)
        before = network.low_bit_choice
        if before == choice:
            choice = before
            if not choice.awaits:
                return choice.left_out
        if self._services.is_warm_up or (call.cut is not None and call.cut.reads):
            return choice.left_out
        if choice.awaits:
            half = half_of(time_of(call.timestep), self._families.of(layout).first_timestep)
            if not half and choice.is_new:
                raise Refusal(TOO_LATE)
            choice = self._measured(network, lossy, call, choice, half)
            if choice.found is not known:
                low_bit.tuning_cache.set(name, choice.found)
        network.low_bit_choice = choice
        if choice is not before and str(choice) != str(before):
            log.info(
                "Low-bit: how much each group of layers in 8 bits changes a step of this %s checkpoint: %s.",
                choice.model, choice,
            )
        return choice.left_out

    def _measured(self, network: Network, lossy: Lossy, call: Call, choice: Choice, half: int) -> Choice:
        """The choice with the errors added that this call has measured: those that the call's half of an image still
        needs, until it is known which classes are within the budget. half: see low_bit_errors.half_of; at 0, nothing is
        measured, and the same choice is returned.

        Runs one forward without a graph for the exact output, one for each class alone, and one for all together; if
        all together exceed the budget, one more each time that a class is left out. Raises Refusal if the exact output
        is not finite, and torch.cuda.OutOfMemoryError.
        """
        exact: Tensor | None = None
        while due := choice.due(half):
            self._quantize(network, choice.wanted, choice.left_out)
            if exact is None:
                exact = self._output(network, lossy, call, ())
            if not bool(torch.isfinite(exact).all()):
                raise Refusal(NOT_FINITE)
            for group in due:
                error = relative_error(self._output(network, lossy, call, choice.layers(group)), exact)
                choice = choice.measured(group, half, error)
                log.debug("Low-bit in half %d of an image, %s: error %.1e", half, TOGETHER.join(group), error)
        return choice

    def _quantize(self, network: Network, wanted: WantedKinds, left_out: frozenset[str]) -> bool:
        """Quantize the wanted layers whose class is not in left_out. 8-bit weights that were made for another left_out,
        and the graphs that read them, are dropped first. Returns False, and quantizes nothing, if there are wanted
        layers and all are left out; otherwise True, also if no layer is wanted. Raises torch.cuda.OutOfMemoryError."""
        if network.low_bit is not None and network.low_bit.left_out != left_out:
            # Existing graphs were captured for another choice of layers.
            self._graphs.drop_low_bit(network)
        low_bit = self._devices.lossy.low_bit
        classes = low_bit.classes(network.bound.layout)
        chosen = {layer: kind for layer, kind in wanted.items() if classes[layer] not in left_out}
        if wanted and not chosen:
            return False
        network.fit_low_bit(low_bit.quantizer(), chosen, left_out)
        return True

    def _output(self, network: Network, lossy: Lossy, call: Call, layers: Collection[str]) -> Tensor:
        """The output of the whole network for a call, without the call's cut and without a graph. layers: the names of
        the layers to compute in eight bits, which must have 8-bit weights; () gives the exact output."""
        ops = self._devices.lossy.operators()
        whole = replace(call, cut=None)
        source = network.source(lossy, whole, layers)
        return self._families.output(source.layout, source.weights(), ops, whole)

"""Has the weights in eight bits ready that a call wants: of the products that gain, in the classes of layers that this
checkpoint bears.

What it bears is measured once, in the calls of the user's own image: the output with one class alone in eight bits, and
with all that is used, against the same call with none.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..core.sampling import time_of
from ..engines import OFFLOADING, WITHOUT_ATTENTION
from ..engines.graphs.cache import GraphCache
from ..engines.low_bit import KINDS_OF
from ..engines.managed_unet import ManagedUNet
from ..engines.operator_sets import OperatorSets
from ..engines.sensitivity import BOTH, SECOND_HALF, TOGETHER, Choice, Findings, Question, digest_of_layers, half_of
from ..model.call import UNetCall
from ..model.cuts import compute
from ..model.low_bit import LowBitBinding, WantedKinds
from ..model.offload import NoHostMemory
from ..options.settings import MOST_LOW_BIT_ERROR
from .backend_choice import NO_ROOM
from .verify import relative_error

log = logging.getLogger("onediff")
TOO_LATE = "what Low-bit does to this checkpoint is measured where an image begins earlier, not in its last steps"
NOT_FINITE = "what Low-bit does here cannot be measured: the exact output has NaN or infinite values"


def nothing_within(budget: float) -> str:
    return f"no class of layers in eight bits keeps this checkpoint within the error budget of {budget:g} (measured)"


class LowBitRoute:
    """Whoever calls holds the runtime's lock."""

    def __init__(self, graphs: GraphCache, operators: OperatorSets, waits_for_compile: Callable[[], bool]) -> None:
        """waits_for_compile: see Services."""
        self._graphs = graphs
        self._operators = operators
        self._waits_for_compile = waits_for_compile

    def tune(self, managed: ManagedUNet, backend: str, call: UNetCall) -> bool:
        """Measure which products and attentions in eight bits pay, where that is not known; whether it was so."""
        time_ms = partial(self._graphs.time_ms, call.latent.device, call.latent.dtype)
        return self._operators.tune_low_bit(backend, managed.bound.layout, call, time_ms)

    def fit(self, managed: ManagedUNet, backend: str, call: UNetCall, budget: float) -> str | None:
        """Have the weights in eight bits that a backend wants for this call: those that pay within a budget, or, where
        they take the place of the host's, all. Returns why there are none, or no attention that the backend has, or
        None.
        """
        if managed.no_room_for_low_bit:
            return NO_ROOM
        low_bit, alone, layout = self._operators.low_bit, backend in OFFLOADING, managed.bound.layout
        if backend in WITHOUT_ATTENTION:
            # Measured a moment ago, maybe.
            lack = low_bit.why_no_attention(layout, call)
            if lack is not None:
                return lack
        other = managed.low_bit is not None and not managed.low_bit.kinds() <= set(KINDS_OF[backend])
        if other or (alone and not managed.bound.offloaded):
            # Those of another choice.
            self._graphs.drop_low_bit(managed)
        wanted, left_out = low_bit.wanted(backend, layout, call), frozenset[str]()
        try:
            if alone:
                managed.low_bit_choice = None
                if managed.fit_low_bit_alone(low_bit.quantizer(), wanted):
                    # What torch keeps unused is what was gained.
                    self._graphs.card.empty_cache()
                return None
            if backend in WITHOUT_ATTENTION:
                wanted = {**wanted, **low_bit.attentions(layout, call)}
            if budget >= MOST_LOW_BIT_ERROR or low_bit.choice.everywhere:
                managed.low_bit_choice = None
            else:
                question = self._question(managed, backend, call, wanted, budget)
                found = self._left_out(managed, backend, call, question)
                if isinstance(found, str):
                    return found
                left_out = found
            return None if self._have(managed, wanted, left_out) else nothing_within(budget)
        except torch.cuda.OutOfMemoryError:
            self._graphs.drop_low_bit(managed)
            managed.no_room_for_low_bit = True
            return NO_ROOM
        except NoHostMemory as full:
            self._graphs.drop_low_bit(managed)
            managed.why_not_offloaded = str(full)
            return managed.why_not_offloaded
        except Exception:
            self._graphs.drop_low_bit(managed)
            raise

    def _question(
        self, managed: ManagedUNet, backend: str, call: UNetCall, wanted: WantedKinds, budget: float
    ) -> Question:
        low_bit, dtype = self._operators.low_bit, str(call.latent.dtype).removeprefix("torch.")
        findings = Findings(low_bit.tuning_cache, managed.bound.checkpoint(), backend, dtype)
        return Question(findings, wanted, low_bit.classes(managed.bound.layout), budget)

    def _left_out(
        self, managed: ManagedUNet, backend: str, call: UNetCall, question: Question
    ) -> frozenset[str] | str:
        """The classes of layers that stay exact, measured where that is not known; or why that cannot be.

        A call that makes a shape ready belongs to no image, and a cached pass is no whole step: they measure nothing,
        and what is not known is in eight bits. Raises torch.cuda.OutOfMemoryError.
        """
        before, may_be = managed.low_bit_choice, self._may_be(managed)
        choice = before if before is not None and before.answers(question) else None
        if choice is not None and not choice.awaits & may_be:
            return choice.left_out
        if self._waits_for_compile() or (call.cut is not None and call.cut.reads):
            return question.left_out()
        if question.awaits(question.chosen()):
            half = half_of(time_of(call.timestep))
            if choice is not None and not choice.awaits & half:
                return choice.left_out
            if not half:
                return TOO_LATE if question.unknown() else question.left_out()
            if not self._measure(managed, backend, call, question, half):
                return NOT_FINITE
        choice = managed.low_bit_choice = Choice.of(managed.bound.layout.model_name, question)
        if str(choice) != str(before):
            log.info("Low-bit on this %s checkpoint: %s.", choice.model, choice)
        return choice.left_out

    def _may_be(self, managed: ManagedUNet) -> int:
        """The halves of an image that this call may be in, where nobody has asked the GPU for its timestep: one that
        begins in the second never comes to the first."""
        begins = not managed.bound.in_sampling or managed.low_bit_sampling != managed.bound.samplings
        managed.low_bit_sampling = managed.bound.samplings
        return BOTH if begins else SECOND_HALF

    def _measure(self, managed: ManagedUNet, backend: str, call: UNetCall, question: Question, half: int) -> bool:
        """Measure until it is known what is within the budget: a forward pass for each class and for all together, and
        for fewer until they are within it, without a graph. Whether it could be done. Raises
        torch.cuda.OutOfMemoryError."""
        exact: Tensor | None = None
        while due := question.due(question.chosen(), half):
            self._have(managed, question.wanted, question.left_out())
            exact = self._output(managed, backend, call, ()) if exact is None else exact
            if not bool(torch.isfinite(exact).all()):
                return False
            for classes in due:
                layers = question.layers(classes)
                error = relative_error(self._output(managed, backend, call, layers), exact)
                question.findings.note(classes, digest_of_layers(layers), half, error)
                log.debug("Low-bit in half %d of an image, %s: error %.1e", half, TOGETHER.join(classes), error)
        return True

    def _have(self, managed: ManagedUNet, wanted: WantedKinds, left_out: frozenset[str]) -> bool:
        """Have the wanted layers in eight bits that are not of these classes; whether any is left, or an attention.
        Raises torch.cuda.OutOfMemoryError."""
        if managed.low_bit is not None and managed.low_bit.left_out != left_out:
            # Graphs have another choice in them.
            self._graphs.drop_low_bit(managed)
        low_bit, layout = self._operators.low_bit, managed.bound.layout
        classes, layers = low_bit.classes(layout), low_bit.plan.classes(layout)
        left = {layer: kinds for layer, kinds in wanted.items() if classes[layer] not in left_out}
        if wanted and not left:
            return False
        # An attention has no weights.
        weights = {layer: kinds for layer, kinds in left.items() if layer in layers}
        managed.fit_low_bit(low_bit.quantizer(), weights, left_out)
        return True

    def _output(self, managed: ManagedUNet, backend: str, call: UNetCall, layers: Collection[str]) -> Tensor:
        """The whole UNet's, with these layers alone in eight bits."""
        assert managed.low_bit is not None
        if set(layers) <= self._operators.low_bit.plan.classes(managed.bound.layout).keys():
            backend = WITHOUT_ATTENTION.get(backend, backend)
        binding = LowBitBinding(managed.bound.binding, managed.low_bit, KINDS_OF[backend], layers)
        whole = replace(call, cut=None)
        return compute(binding.layout, binding.weights(), self._operators.of(backend), whole)

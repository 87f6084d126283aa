"""Passes a call through the step policies that are on: each may answer it, or leave it to the next one."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial

from ..core.attempt import HostError, Outcome, as_host, attempted
from ..core.call import Call
from ..core.guard import Guard
from ..core.policy import Answer, Compute, Guidance, Host, Served, StepContext, StepPolicy
from ..core.sampling import Sampling
from ..core.settings import Settings
from .network import Network
from .services import Services


class RecordingCompute:
    """The Compute that a policy gets for one call: passes calls to the next Compute, and records the results.

    By the records, a fault of the policy is told from a fault of the next Compute. After a fault of the policy, a
    recorded answer need not be computed again.

    answer: the next Compute's last answer to the host's call (a call that the policy made with the host's own forward
        of the whole call); None if there is none yet.
    raised: the last Exception of the next Compute (a HostError is none); None if there was none.
    """

    def __init__(self, compute: Compute, host: Host | None) -> None:
        """compute: the next Compute. host: the host's own forward of the call for which the policy was asked."""
        self._compute = compute
        self._host = host
        self.answer: Answer | None = None
        self.raised: Exception | None = None

    def __call__(self, call: Call, host: Host | None) -> Answer:
        """The answer of the next Compute to a call that the policy makes.

        If host is the `host` of __init__, or None, an exception of the host is raised as a HostError, which ends the
        call. With another host, the policy has made a call of its own, such as one of some rows: then an Exception of
        the host is raised without HostError, so that it counts as the policy's fault.
        """
        is_whole = host is None or host is self._host
        try:
            with self._noting():
                answer = self._compute(call, host)
        except HostError as passing:
            if is_whole or not isinstance(passing.error, Exception):
                raise
            raise passing.error from None
        if is_whole and host is not None:
            self.answer = answer
        return answer

    def check(self, call: Call, served: Served) -> None:
        """See core.policy.Compute.check; done by the next Compute. An exception is recorded, and raised."""
        with self._noting():
            self._compute.check(call, served)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """A context that sets `raised` to an Exception of the code inside, and raises it again. Any other exception,
        such as a HostError or a KeyboardInterrupt, is raised without being recorded."""
        try:
            yield
        except Exception as error:
            self.raised = error
            raise


class PolicyLayer:
    """A Compute that lets one policy answer each call, and uses the next Compute if the policy does not."""

    def __init__(
        self, policy: StepPolicy, compute: Compute, guard: Guard,
        step_context_of: Callable[[Call, Host | None], StepContext],
    ) -> None:
        """compute: the next Compute. step_context_of: step_context_of(call, host) makes the StepContext of a call."""
        self._policy = policy
        self._compute = compute
        self._guard = guard
        self._step_context_of = step_context_of

    def __call__(self, call: Call, host: Host | None) -> Answer:
        """The answer of the policy; if the policy refuses or fails, the answer of the next Compute.

        A refusal's reason is shown in the policy's status. After a fault, the policy is inactive until the next
        sampling_run (core.sampling.Position); if the next Compute has answered the host's call before the fault, that
        answer is used. An exception of the next Compute is raised.
        """
        host = None if host is None else as_host(host)
        step_context = self._step_context_of(call, host)
        before = self._policy.status.copy()
        try:
            return self._answer(step_context, call, host)
        finally:
            if step_context.is_counted:
                note = partial(step_context.call_stats.note_policy, self._policy.name, before, self._policy.status)
                self._guard.attempt("counting a policy's steps", note)

    def _answer(self, step_context: StepContext, call: Call, host: Host | None) -> Answer:
        """See __call__, which in addition counts the policy's steps."""
        policy = self._policy
        chosen = attempted(lambda: policy.answerer(step_context))
        if chosen.outcome is Outcome.REFUSED:
            if step_context.is_counted:
                note_inactive(policy, chosen.reason)
            return self._compute(call, host)
        if chosen.fault is not None:
            self._charge(step_context, chosen.fault)
            return self._compute(call, host)
        recording = RecordingCompute(self._compute, host)
        answered = attempted(lambda: chosen.given()(recording))
        try:
            if answered.fault is None or answered.fault is recording.raised:
                return answered.given()
        finally:
            # Break the cycle: its traceback refers to this frame.
            recording.raised = None
        self._charge(step_context, answered.fault)
        return recording.answer or self._compute(call, host)

    def _charge(self, step_context: StepContext, fault: Exception) -> None:
        """Log a fault of the policy, and make the policy inactive until the next sampling_run. A policy without a
        memory of this network tries again at the next call."""
        policy = self._policy
        note_inactive(policy, self._guard.note(policy.title, fault))
        if (memory := step_context.memories.get(policy.name)) is not None:
            memory.is_broken = True

    def check(self, call: Call, served: Served) -> None:
        """See core.policy.Compute.check; done by the next Compute."""
        self._compute.check(call, served)


class Stepping:
    """The step policies of a runtime, and which of them are on.

    policies: all of them, the outermost first: the first one decides about a call before the others.
    """

    def __init__(
        self, services: Services, policies: Iterable[StepPolicy], sampling_of: Callable[[Network], Sampling]
    ) -> None:
        """sampling_of: returns the sampling in progress of a network; see Runtime.sampling_of."""
        self._services = services
        self._sampling_of = sampling_of
        self.policies = tuple(policies)
        # The last arguments and result of _names_on.
        self._last_names: tuple[Settings, tuple[StepPolicy, ...], frozenset[str]] | None = None

    def _names_on(self, settings: Settings) -> frozenset[str]:
        """The names of the policies that these settings turn on. The last result is kept, and returned again for the
        same Settings object, which is immutable."""
        last = self._last_names
        if last is None or last[0] is not settings or last[1] is not self.policies:
            names = frozenset(policy.name for policy in self.policies if policy.is_on(settings))
            self._last_names = (settings, self.policies, names)
            return names
        return last[2]

    def any_is_on(self, settings: Settings, whole_batch: bool | None = None) -> bool:
        """Whether these settings turn any policy on. whole_batch: True: only policies that decide for a whole batch
        count; False: only those that decide for each GPU's rows (StepPolicy.whole_batch); None: all count."""
        names = self._names_on(settings)
        return any(policy.name in names and whole_batch in (None, policy.whole_batch) for policy in self.policies)

    def around(
        self, compute: Compute, whole_batch: bool, network: Network, settings: Settings,
        guidance: Guidance | None = None, is_counted: bool = True,
    ) -> Compute:
        """`compute`, wrapped in a PolicyLayer for each policy that is on and whose StepPolicy.whole_batch equals
        whole_batch; `compute` itself if there is none. The policies with the same whole_batch that are off lose their
        memory of this network, and their reason for being inactive. guidance, is_counted: see StepContext."""
        mine = [policy for policy in self.policies if policy.whole_batch is whole_batch]
        names = self._names_on(settings)
        on = [policy for policy in mine if policy.name in names]
        for policy in mine:
            if policy not in on:
                note_inactive(policy)
                network.step_memories.pop(policy.name, None)
        if not on:
            return compute
        services = self._services
        sampling = self._sampling_of(network)
        is_warm_up = services.is_warm_up

        def step_context_of(call: Call, host: Host | None) -> StepContext:
            assert host is not None, "policies need the host's forward"
            bound = network.bound
            return StepContext(
                call, host, settings, sampling, guidance, services.call_stats, network.step_memories,
                cache(partial(sampling.position, call.timestep)), network.deepest, network.schedule,
                network.cut_memory,
                bound.values_now, partial(services.computing, call.latent.device), is_warm_up, is_counted,
            )

        for policy in reversed(on):
            compute = PolicyLayer(policy, compute, services.guard, step_context_of)
        return compute

    def clear_reasons(self) -> None:
        """Clear all policies' reasons for being inactive. Called when all policies are off."""
        for policy in self.policies:
            note_inactive(policy)


def note_inactive(policy: StepPolicy, reason: str = "") -> None:
    """Set the sentence in a policy's status that tells users why the policy is inactive. reason: "" clears the
    sentence, because the policy is active or off."""
    policy.status["reason"] = f"{policy.title} is inactive: {reason}" if reason else ""

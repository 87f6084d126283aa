"""Computes calls of several rows on two GPUs: each computes half of the rows, with its own copy of weights and graphs.

A UNet computes each row of a batch independently, so prompt and negative prompt, and the images of a batch, can be
computed on different GPUs. The second GPU's copy is a Network like any other, so that graphs, checks, budgets and step
policies work for each GPU's rows as for a call on one. torch orders the copies between the GPUs by events; the CPU does
not wait for them.
"""
from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..core.attempt import Outcome, as_host, attempted
from ..core.call import Call, why_rows_stay_together
from ..core.device_memory import Card
from ..core.fields import mapped
from ..core.image import GRAPH, PLAIN
from ..core.inputs import take_rows
from ..core.policy import Answer, Host, Served
from ..core.refusal import Refusal
from ..core.settings import Settings
from ..core.units import GIBIBYTE
from ..core.weak_dictionary import WeakDictionary
from ..weights.mirror import MirrorNetwork, bytes_of, empty_copy
from .card_route import CardRoute
from .network import Network
from .plan import replayed
from .services import Services
from .stepping import Stepping

log = logging.getLogger("onediff")
# Reasons, for users, why one GPU computes a call.
NO_SECOND = "PyTorch sees only one GPU"
ONE_ROW = "the step computes a single latent, which cannot be split"
CAPTURES = "code outside of OneDiff is capturing a CUDA graph"
FULL = "out of memory on {}: one GPU computes until the weights or the settings change"


def second_card(first: torch.device, needs: int, cards: Card) -> torch.device:
    """The first GPU, in the order of their indices and without `first`, that has room for `needs` bytes. Raises
    Refusal, with the reason for users, if there is none, or if `first` is no GPU. cards: reads the GPUs' memory."""
    all_cards = cards.all()
    if first not in all_cards:
        raise Refusal(f"this UNet is on the {first.type.upper()}, not on a GPU")
    others = [card for card in all_cards if card != first]
    if not others:
        raise Refusal(NO_SECOND)
    rooms = [(card, cards.room(card)) for card in others]
    for card, room in rooms:
        if room >= needs:
            return card
    if not needs:
        raise Refusal("no other GPU has free memory")
    # Rounded so that a room that is too small never looks large enough.
    said = ", ".join(f"{card} has room for {math.floor(max(0, room) / GIBIBYTE * 10) / 10} GiB" for card, room in rooms)
    raise Refusal(f"the weights take {math.ceil(needs / GIBIBYTE * 10) / 10} GiB, {said}")


class SecondGpuFull(Refusal):
    """The second GPU's memory is full, so one GPU computes until the weights or the memory budget change."""


@dataclass
class Pair:
    """A network's copy on the second GPU.

    unet: the copy: modules of our own that only have parameters.
    network: the copy's record; its `bound` is the mirror.
    mirror: updates the copy when the original's weights change.
    device: the second GPU, on which the copy is.
    first: the GPU of the original.
    bytes: the size of the copied weights.
    """

    unet: nn.Module
    network: Network
    mirror: MirrorNetwork
    device: torch.device
    first: torch.device
    bytes: int

    def rows(self, call: Call, rows: slice) -> Call:
        """A call of these rows of a call, copied to the second GPU. The CPU only launches the copies: the GPUs make
        them when the first GPU has computed the inputs."""
        return mapped(take_rows(call, rows), lambda tensor: tensor.to(self.device, non_blocking=True))

    def follow(self, first: Network) -> None:
        """Give the copy's record the settings and the sampling of `first`, the original's record. If the original is in
        another sampling than at the last call, the copy's plans are dropped. Called before each call of the copy."""
        self.network.settings = first.settings
        if self.network.samplings != first.samplings:
            self.network.plans.clear()
        self.network.samplings = first.samplings
        self.network.in_sampling = first.in_sampling
        self.network.sampling = first.sampling
        self.network.no_room_for_low_bit = first.no_room_for_low_bit


class WhyOneCard(NamedTuple):
    """Why one GPU computes a network's calls, and the conditions under which the reason was found. The reason holds as
    long as the conditions are the same.

    reason: for users.
    memory_budget: the option of the settings.
    structure, values: of the network's epoch.
    sampling: Network.samplings; None if the reason holds for later samplings too.
    """

    reason: str
    memory_budget: int
    structure: int
    values: int
    sampling: int | None

    @classmethod
    def of(cls, reason: str, lasts: bool, network: Network, settings: Settings) -> WhyOneCard:
        """A reason under the present conditions. lasts: whether it holds for later samplings too."""
        epoch = network.bound.epoch
        return cls(
            reason, settings.memory_budget, epoch.structure, epoch.values, None if lasts else network.samplings
        )

    def holds(self, network: Network, settings: Settings) -> bool:
        """Whether the conditions are the same now."""
        return self == WhyOneCard.of(self.reason, self.sampling is None, network, settings)


class TwoGpusRoute:
    """Computes calls on two GPUs, if the settings choose that.

    is_used: whether answer() was ever called; before that, there is nothing to forget.
    cards: reads the GPUs' memory.
    """

    def __init__(
        self, services: Services, stepping: Stepping, by_card: CardRoute, release: Callable[[nn.Module], None]
    ) -> None:
        """by_card: computes each GPU's rows. release: releases a network; see Runtime.release."""
        self._services = services
        self._stepping = stepping
        self._by_card = by_card
        self._release = release
        self.is_used = False
        self.cards = Card()
        self._pairs: WeakDictionary[nn.Module, Pair] = WeakDictionary()
        self._on_one_card: WeakDictionary[nn.Module, WhyOneCard] = WeakDictionary()
        # The number of calls that both have computed.
        self._calls = 0
        # How the GPUs shared the last call, or why one GPU computed it, in words for users.
        self._split = ""
        self._why_one_card = ""
        self._logged: set[str] = set()

    def status(self) -> dict[str, int | str]:
        """The status for users: "calls": the number of calls computed on two GPUs; "split": how the GPUs have shared
        the last call, "" if one GPU computed it; "reason": why one GPU computed it, "" if two did, or if the option is
        off; "bytes": the bytes of all copied weights."""
        copies = sum(pair.bytes for pair in self._pairs.values())
        return {"calls": self._calls, "split": self._split, "reason": self._why_one_card, "bytes": copies}

    def note(self, split: str = "", why_one: str = "") -> None:
        """Set what the status says of the last call, and log that if the same words were not logged before. split: how
        two GPUs have shared the call. why_one: why one GPU has computed the call although the option is on. Without
        arguments, the status says nothing, because the option is off or OneDiff has not computed the call."""
        self._split = split
        self._why_one_card = why_one
        sentence = f"two GPUs: {split}" if split else f"one GPU: {why_one}" if why_one else ""
        if sentence and sentence not in self._logged:
            self._logged.add(sentence)
            log.info("%s", sentence)

    def forget(self, unet: nn.Module) -> None:
        """Free a network's copy on the second GPU, and forget why one GPU computed the network's calls. Does nothing
        for a network without a copy or such a reason. Called when the network is released, or when one GPU computes it
        from now on. When the last network is forgotten, the status is cleared."""
        self._on_one_card.pop(unet, None)
        pair = self._pairs.pop(unet, None)
        if pair is not None:
            self._release(pair.unet)
        if not self._pairs and not self._on_one_card:
            self.note()

    def forget_all(self, but: nn.Module | None = None) -> None:
        """Forget all networks that have a copy on a second GPU (see forget), except `but`; None: all of them."""
        for unet in self._pairs:
            if unet is not but:
                self.forget(unet)

    def answer(self, network: Network, settings: Settings, call: Call, host: Host) -> Answer | None:
        """The output of a call by two GPUs; the call is counted. None if one GPU must compute the call: then nothing is
        counted, and the status has the reason. A reason that showed only while the call was computed is remembered: in
        an announced sampling until the next one begins; if the second GPU is full, or after a fault of ours, which is
        logged, until the weights or the memory budget change, and then the copy is freed too.

        Raises HostError, and torch.cuda.OutOfMemoryError if the first GPU is full.
        """
        self.is_used = True
        allowed = attempted(lambda: self._refuse(network, settings, call))
        if allowed.outcome is Outcome.REFUSED:
            self.note(why_one=allowed.reason)
            return None
        allowed.given()
        in_sampling = network.in_sampling
        unet = network.bound.module
        made = attempted(lambda: self._serve(network, settings, call, as_host(host)))
        if made.is_ours:
            served, split = made.given()
            self._services.guard.attempt("counting a call", lambda: self._count(served, split))
            return Answer(served.output, served)
        if made.outcome is Outcome.OUT_OF_MEMORY:
            made.given()
        reason = made.reason
        lasts = isinstance(made.error, SecondGpuFull)
        if made.fault is not None:
            reason = self._services.guard.note("computing on two GPUs", made.fault)
            lasts = True
        if lasts:
            self._services.guard.attempt("giving the second GPU back", lambda: self.forget(unet))
        # Outside of announced samplings, a reason that does not last is not remembered: the next call tries again.
        if lasts or in_sampling:
            self._on_one_card[unet] = WhyOneCard.of(reason, lasts, network, settings)
        self.note(why_one=reason)
        return None

    def _count(self, served: Served, split: str) -> None:
        """Count a call by two GPUs. split: how the GPUs have shared the call, for users."""
        self._calls += 1
        self.note(split)
        # The host computes on one GPU, and is not timed in these calls.
        with self._services.call_stats.standing_for(None):
            self._services.call_stats.note_served(served)

    def _refuse(self, network: Network, settings: Settings, call: Call) -> None:
        """Raise Refusal if it is known, before anything is computed, that one GPU must compute the call. Forgets a
        remembered reason that does not hold any more."""
        if call.latent.shape[0] < 2:
            raise Refusal(ONE_ROW)
        if call.latent.is_cuda and torch.cuda.is_current_stream_capturing():
            raise Refusal(CAPTURES)
        known = self._on_one_card.get(network.bound.module)
        if known is not None:
            if known.holds(network, settings):
                raise Refusal(known.reason)
            del self._on_one_card[network.bound.module]
        if network.bound.has_binding:
            refuse_marked_weights(network)
        if lack := why_rows_stay_together(call):
            raise Refusal(lack)

    def _serve(
        self, network: Network, settings: Settings, call: Call, host: Host
    ) -> tuple[Served, str]:
        """How the call was served, and how the GPUs have shared it, for users ("cuda:0 + cuda:1, 1+1 rows"). The first
        GPU computes the first half of the rows; of an odd number, it computes one row more than the second GPU. The
        copy on the second GPU is made at the first call. Raises Refusal if one GPU must compute the call, and the
        exceptions of CardRoute.answer.

        If the second GPU has a plan for its rows, they are launched first, so that the second GPU computes while the
        first GPU's rows are launched.
        """
        first_card = call.latent.device
        batch = call.latent.shape[0]
        pair = self._pair(network, first_card)
        if pair is None:
            self._choose(network, first_card)
        first_rows = slice(0, batch - batch // 2)
        second_rows = slice(batch - batch // 2, batch)
        here = take_rows(call, first_rows)
        second = None
        if pair is not None and pair.mirror.has_binding and not self._stepping.any_is_on(settings, whole_batch=False):
            pair.follow(network)
            with self._on(pair.device):
                # The inputs are copied to the second GPU before the plan is looked up, because its signature contains
                # their device.
                there = pair.rows(call, second_rows)
                second = replayed(self._services, pair.network, there, settings)
        card = self._by_card.card(network, settings, times_host=False)
        first = served_of(self._by_card.answer(card, here, lambda: host()[first_rows]))
        if pair is None:
            pair = self._make(network, settings, first_card)
        # Look for changed weights while both GPUs compute. If the copy is stale, its rows are computed again below.
        if not pair.mirror.is_up_to_date():
            second = None
            pair.network.plans.clear()
        if second is None:
            second = self._second(pair, network, settings, call, second_rows, host)
        network.has_served = True
        output = torch.cat([first.output, second.output.to(first_card, non_blocking=True)])
        rows = f"{first.output.shape[0]}+{second.output.shape[0]} rows"
        route = GRAPH if first.route == second.route == GRAPH else PLAIN
        served = first._replace(output=output, route=route, reason=first.reason or second.reason)
        return served, f"{first_card} + {pair.device}, {rows}"

    def _second(
        self, pair: Pair, network: Network, settings: Settings, call: Call, rows: slice, host: Host
    ) -> Served:
        """How the second GPU's rows were served, by the slow path: the copy of the weights is brought up to date, and
        the first output of a shape is compared with the host's. rows: the second GPU's rows of the call. host: the
        host's forward of the whole call, on the first GPU. Raises SecondGpuFull, and the exceptions of served_of."""

        def of_host() -> Tensor:
            with self.cards.using(call.latent.device):
                return host()[rows].to(pair.device)

        pair.follow(network)
        with self._on(pair.device):
            card = self._by_card.card(pair.network, settings, times_host=False)
            return served_of(self._by_card.answer(card, pair.rows(call, rows), of_host, is_counted=False))

    # --- the copy -------------------------------------------------------------------------------------------------

    def _pair(self, network: Network, first: torch.device) -> Pair | None:
        """The existing Pair of a network that is on the GPU `first`. None if there is none, or if the network has other
        layers or was on another GPU when its copy was made: then the copy is freed."""
        pair = self._pairs.get(network.bound.module)
        if pair is None or pair.first == first and pair.mirror.is_of(network.bound):
            return pair
        self.forget(network.bound.module)
        return None

    def _choose(self, network: Network, first: torch.device) -> torch.device:
        """The GPU for a network's copy: one with room for the weights, or, before the network's first call, any,
        because the weights' size is unknown. If no GPU has room, the copies of other networks are freed first. Raises
        Refusal if no GPU has room after that either."""
        needs = bytes_of(network.bound.binding) if network.bound.has_binding else 0
        try:
            return second_card(first, needs, self.cards)
        except Refusal:
            if not self._pairs:
                raise
            # Make room: drop the copies of other networks, which serve speed alone.
            self.forget_all(but=network.bound.module)
            return second_card(first, needs, self.cards)

    def _make(self, network: Network, settings: Settings, first: torch.device) -> Pair:
        """Allocate a network's copy on the second GPU, and serve the copy like a network. The weights' values are
        copied later, at the copy's next refresh. Raises Refusal if no GPU has room, and for refuse_marked_weights;
        SecondGpuFull if the allocation fails."""
        refuse_marked_weights(network)
        binding = network.bound.binding
        device = self._choose(network, first)
        with self._on(device):
            copy = empty_copy(binding, device)
        mirror = MirrorNetwork(network.bound, copy)
        copied = Network(copy, settings, mirror.host_traits, mirror, self._services.families)
        pair = Pair(copy, copied, mirror, device, first, bytes_of(binding))
        self._pairs[network.bound.module] = pair
        with self._services.lock:
            self._services.networks[copy] = copied
        return pair

    @contextlib.contextmanager
    def _on(self, device: torch.device) -> Iterator[None]:
        """A context in which `device`, the second GPU, is torch's current one. A torch.cuda.OutOfMemoryError inside is
        raised as SecondGpuFull, so that the first GPU's memory is not freed for it."""
        try:
            with self.cards.using(device):
                yield
        except torch.cuda.OutOfMemoryError:
            raise SecondGpuFull(FULL.format(device)) from None


def refuse_marked_weights(network: Network) -> None:
    """Raise Refusal if a copy of the stored weights on the second GPU would not be enough: because the host changes its
    weights at each use (Network.weight_marks), or because some of them are streamed from main memory."""
    if network.weight_marks:
        raise Refusal(f"two GPUs do not support {' and '.join(network.weight_marks)}")
    if network.bound.streaming is not None:
        raise Refusal("a part of the model's weights is in main memory, and with two GPUs each one needs all of them")


def served_of(answer: Answer) -> Served:
    """How one GPU's rows were served. Raises Refusal if a step policy has extrapolated the rows: then nothing was
    computed, and a second GPU gains nothing."""
    if answer.served is None:
        raise Refusal("this step is extrapolated, so one GPU suffices")
    return answer.served

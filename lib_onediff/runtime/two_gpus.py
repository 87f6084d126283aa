"""Calls of several rows on two GPUs: each computes a part of the rows, by a copy of the weights and graphs of its own.

A UNet computes every row of a batch by itself, so prompt and negative prompt, and the images of a batch, can be
computed apart. The second card's copy is a UNet in our care like a host's: what is true of one card's calls (graphs,
checks, budgets, DeepCache) is true of each card's rows. torch orders the copies between the cards by events; nobody
waits for a GPU.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from ..engines import ONEFLOW
from ..engines.managed_unet import ManagedUNet
from ..guard import Guard
from ..model.call import UNetCall
from ..model.layout import UnsupportedUNet
from ..model.mirror import MirrorUNet, bytes_of, empty_copy
from ..model.rows import take_rows, why_not_taken
from ..options.settings import Settings
from ..shapes.table import Stopwatch
from ..weak_dictionary import WeakDictionary
from .call_stats import GRAPH, PLAIN, CallResult, CallStats
from .card_pair import Known, Pair, Rest
from .cards import Cards, second_card, second_share
from .fallback import COMPILING

ONE_ROW = "the call has one row"
CAPTURES = "the caller captures a CUDA graph of its own"
TOO_SLOW = "one GPU is sooner done than both"
FULL = "out of memory on {}: until the weights or the option change, one GPU computes"


class Serves(Protocol):
    """Who computes rows: the accelerator."""

    def take_in(self, unet: nn.Module, managed: ManagedUNet) -> None:
        """Have a UNet of ours in care."""

    def release(self, unet: nn.Module) -> None:
        """Have it no longer."""

    def replay(
        self, unet: nn.Module, call: UNetCall, known: Known, device: torch.device | None = None
    ) -> CallResult | None:
        """The output, where an earlier call like this one tells how; None where something has to be found out.
        device: where it is computed, if not where the latent is."""

    def serve(
        self, unet: nn.Module, call: UNetCall, host: Callable[[], Tensor], times_host: bool = True
    ) -> CallResult | str:
        """The output, or why it cannot be computed."""


class SecondGpuFull(Exception):
    """The second card's memory is full."""


class TwoGpusRoute:
    """Computes calls on two cards, where that is chosen. in_use: whether a second card holds anything."""

    def __init__(self, guard: Guard, call_stats: CallStats, serves: Serves, cards: Cards | None = None) -> None:
        self._guard, self._call_stats, self._serves = guard, call_stats, serves
        self.cards = cards or Cards()
        self._pairs: WeakDictionary[nn.Module, Pair] = WeakDictionary()
        self._rests: WeakDictionary[nn.Module, Rest] = WeakDictionary()
        # The host's own is not timed beside two cards.
        self._untimed = Stopwatch()

    @property
    def in_use(self) -> bool:
        return bool(self._pairs) or bool(self._rests)

    def bytes(self) -> int:
        """What the copies of weights take on second cards."""
        return sum(pair.bytes for pair in self._pairs.values())

    def forget(self, unet: nn.Module) -> None:
        """The UNet is given back, or computed on one card from now on: give the second card's memory back."""
        self._rests.pop(unet, None)
        pair = self._pairs.pop(unet, None)
        if pair is not None:
            self._serves.release(pair.unet)
        if not self.in_use:
            self._call_stats.forget_two_gpus()

    def forget_all(self, but: nn.Module | None = None) -> None:
        for unet in self._pairs:
            if unet is not but:
                self.forget(unet)

    def run(self, unet: nn.Module, call: UNetCall, host: Callable[[], Tensor], known: Known) -> Tensor | None:
        """The output of a call by both cards; None where one has to compute it, for a reason that is noted.

        Raises what the host raises, and torch.cuda.OutOfMemoryError where the first card is full.
        """
        managed, settings = known
        reason = self._why_one(unet, managed, settings, call)
        lasts = drops = False
        if not reason:
            try:
                output = self._split(unet, known, call, host)
                if not isinstance(output, str):
                    return output
                reason, lasts = output, output == TOO_SLOW
            except SecondGpuFull as full:
                reason, lasts, drops = str(full), True, True
            except UnsupportedUNet as refusal:
                reason = str(refusal)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:
                if id(error) == getattr(host, "raised", None):
                    raise
                reason, lasts, drops = self._guard.note("computing on two GPUs", error), True, True
            if drops:
                # Only now is everything gone that was computed before it failed.
                self._guard.attempt("giving the second GPU back", lambda: self.forget(unet))
            # Where nobody says when a sampling ends, the next call may go.
            if reason != COMPILING and (lasts or managed.bound.in_sampling):
                self._rests[unet] = Rest.now(reason, known, lasts)
        self._call_stats.note_one_gpu(reason)
        return None

    def _why_one(self, unet: nn.Module, managed: ManagedUNet, settings: Settings, call: UNetCall) -> str:
        """What is known before anything is computed, in one line for the user; "" where nothing stands in the way."""
        if call.latent.shape[0] < 2:
            return ONE_ROW
        if call.latent.is_cuda and torch.cuda.is_current_stream_capturing():
            return CAPTURES
        rest = self._rests.get(unet)
        if rest is not None:
            if rest.holds(settings, managed.bound):
                return rest.reason
            self._rests.pop(unet, None)
        if settings.backend == ONEFLOW:
            return f"the backend {settings.backend} computes on one GPU"
        if managed.bound.has_binding and managed.kinds:
            return f"the host computes with {' and '.join(managed.kinds)}"
        return why_not_taken(call)

    def _split(self, unet: nn.Module, known: Known, call: UNetCall, host: Callable[[], Tensor]) -> Tensor | str:
        """The output, or why one card has to compute it. Where both know what to do, the second card begins first: the
        first one is done when its own launches are."""
        managed, settings = known
        pair, batch = self._pair(unet, managed, settings, call.latent.device), call.latent.shape[0]
        if pair is None:
            card = self._choose(unet, managed, settings, call.latent.device)
            if isinstance(card, str):
                return card
        share = second_share(batch) if pair is None else pair.share(call, managed.bound.samplings)
        if not share:
            return TOO_SLOW
        first_rows, second_rows = slice(0, batch - share), slice(batch - share, batch)
        second = None
        if pair is not None and pair.mirror.has_binding:
            pair.follow(managed)
            with self._on(pair):
                # Its graph's inputs are copied from the first card.
                there, where = take_rows(call, second_rows), pair.mirror.binding.device
                second = self._serves.replay(pair.unet, there, (pair.managed, settings), where)
        here = take_rows(call, first_rows)
        first: CallResult | str | None = self._serves.replay(unet, here, known)
        was_known = first is not None
        if first is None:
            self._call_stats.begin()
            first = self._serves.serve(unet, here, lambda: host()[first_rows], times_host=False)
        if isinstance(first, str):
            return first
        if first.entry.key.backend == ONEFLOW:
            return f"the backend {first.entry.key.backend} computes on one GPU"
        if pair is None:
            made = self._make(unet, managed, settings, call.latent.device)
            if isinstance(made, str):
                return made
            pair = made
        # Asked now, while both compute: what turns out to be stale is computed again.
        if second is None or not pair.mirror.is_true():
            found = self._second(pair, managed, call, second_rows, host)
            if isinstance(found, str):
                return found
            second = found
        managed.served_last = True
        pair.entries[call.latent.shape] = first.entry, second.entry
        output = torch.cat([first.output, second.output.to(call.latent.device, non_blocking=True)])
        self._note(first, second, was_known, call.latent.device, pair)
        return output

    def _second(
        self, pair: Pair, managed: ManagedUNet, call: UNetCall, rows: slice, host: Callable[[], Tensor]
    ) -> CallResult | str:
        """The second card's rows, with everything found out."""

        def of_host() -> Tensor:
            with self.cards.using(call.latent.device):
                return host()[rows].to(pair.device)

        pair.follow(managed)
        with self._on(pair), self._call_stats.as_before():
            return self._serves.serve(pair.unet, pair.rows(call, rows), of_host, times_host=False)

    def _note(
        self, first: CallResult, second: CallResult, was_known: bool, device: torch.device, pair: Pair
    ) -> None:
        reason = first.reason or second.reason
        with self._call_stats.standing_for(self._untimed):
            if was_known:
                self._call_stats.note_replay(first.entry, reason)
            else:
                self._call_stats.note(GRAPH if first.route == second.route == GRAPH else PLAIN, reason)
        rows = f"{first.output.shape[0]}+{second.output.shape[0]} rows"
        self._call_stats.note_two_gpus(f"{device} + {pair.device}, {rows}")

    def _pair(
        self, unet: nn.Module, managed: ManagedUNet, settings: Settings, first: torch.device
    ) -> Pair | None:
        """The copy that there is, if it is of the layers that the UNet has now, and where the option wants it."""
        pair = self._pairs.get(unet)
        if pair is None or pair.made_for == (settings.second_gpu, first) and pair.mirror.is_of(managed.bound):
            return pair
        self.forget(unet)
        return None

    def _choose(
        self, unet: nn.Module, managed: ManagedUNet, settings: Settings, first: torch.device
    ) -> torch.device | str:
        """The second card, with room for a copy as far as is known; or why there is none."""
        needs = bytes_of(managed.bound.binding) if managed.bound.has_binding else 0
        device = second_card(settings.second_gpu, first, needs, self.cards)
        if isinstance(device, str) and self._pairs:
            # The copies of other UNets are there for speed alone.
            self.forget_all(but=unet)
            device = second_card(settings.second_gpu, first, needs, self.cards)
        return device

    def _make(self, unet: nn.Module, managed: ManagedUNet, settings: Settings, first: torch.device) -> Pair | str:
        """A copy without values, on the card that the option names; or why there is none."""
        if managed.kinds:
            return f"the host computes with {' and '.join(managed.kinds)}"
        binding = managed.bound.binding
        needs, device = bytes_of(binding), self._choose(unet, managed, settings, first)
        if isinstance(device, str):
            return device
        with self._full_of(device), self.cards.using(device):
            copy = empty_copy(binding, device)
        mirror = MirrorUNet(managed.bound, copy)
        copied = ManagedUNet(copy, settings, mirror.host_traits, mirror)
        pair = Pair(
            copy, copied, mirror, device, (settings.second_gpu, first), needs, self.cards.are_equal(first, device),
        )
        self._serves.take_in(copy, copied)
        self._pairs[unet] = pair
        return pair

    @contextlib.contextmanager
    def _on(self, pair: Pair) -> Iterator[None]:
        with self._full_of(pair.device), self.cards.using(pair.device):
            yield

    @contextlib.contextmanager
    def _full_of(self, device: torch.device) -> Iterator[None]:
        """What runs out of memory inside does so on the second card."""
        try:
            yield
        except torch.cuda.OutOfMemoryError:
            raise SecondGpuFull(FULL.format(device)) from None

"""Capture graphs that were dropped a moment ago, into a memory that holds no more than they need."""
from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import torch

from ...core.call import UNetCall
from ...core.key import ShapeKey
from ...core.precision import our_modes
from ...core.table import Entry, State
from ..managed_unet import ManagedUNet
from .accounting import GraphRecord
from .pool_size import memory_of

log = logging.getLogger("onediff")
# How long a step of an image may take longer because older graphs are captured again; the others are when needed.
SECONDS_AN_IMAGE_WAITS = 1.0
# A rehearsal takes about as long as the capture after it.
TIMES_TO_COMPUTE = 2


class CaptureRequest(NamedTuple):
    """What a graph is made of. generation: of the weights that it was made for; seconds: how long that took. Holds
    nothing of the graph itself."""

    managed: ManagedUNet
    entry: Entry
    generation: int
    inputs: UNetCall
    seconds: float = 0.0

    @classmethod
    def of(cls, held: GraphRecord) -> CaptureRequest:
        kept, runner = held.kept, held.kept.runner
        return cls(held.managed, held.entry, kept.generation, runner.inputs, runner.seconds)

    def can_be(self) -> bool:
        """Whether the weights lie where they lay, and nothing has come between. Functions of other extensions are
        called in a call of theirs alone."""
        return not self.entry.key.patches and self.entry.state is State.PROVED and self.managed.stands(self.generation)


def in_time(
    older: Iterable[CaptureRequest], pinned: Collection[ShapeKey], room: int, new: Iterable[CaptureRequest] = ()
) -> list[CaptureRequest]:
    """Those of the older graphs, in this order, that fit into so many bytes together with the new, and take no longer
    than an image can wait for. The pinned take the time that they need."""
    chosen: list[CaptureRequest] = []
    largest, seconds = max((one.entry.needs for one in new), default=0), 0.0
    for one in older:
        needs, takes = max(largest, one.entry.needs), seconds + TIMES_TO_COMPUTE * one.seconds
        in_time = takes <= SECONDS_AN_IMAGE_WAITS or one.entry.key in pinned
        if in_time and memory_of([needs]) <= room:
            chosen.append(one)
            largest, seconds = needs, takes
    return chosen


def capture_again(
    wanted: Iterable[CaptureRequest], make: Callable[[CaptureRequest], None],
    rehearse: Callable[[CaptureRequest], None],
    fits: Callable[[torch.device], bool], empty_cache: Callable[[], None],
) -> None:
    """Make these graphs, the largest first: it gets the memory in one piece, and the others fit into that.

    rehearse makes the call that a capture needs before it in the same thread. What cannot be made stays PROVED, and is
    captured at its next use; so does what comes after the memory has stopped to fit.
    """
    possible = sorted((one for one in wanted if one.can_be()), key=lambda one: -one.entry.needs)
    rehearsed = [one for one in possible if attempted(one, rehearse)]
    if rehearsed:
        # What the rehearsals have left is of no use to a capture.
        empty_cache()
    for one in rehearsed:
        if not attempted(one, make) or not fits(one.entry.key.device):
            break


def attempted(one: CaptureRequest, work: Callable[[CaptureRequest], None]) -> bool:
    """Whether work(one) was possible; it may lack memory, or be what cannot be captured here."""
    try:
        with our_modes(one.entry.key.device, one.entry.key.precision):
            work(one)
    except Exception as error:
        log.debug("%s is not captured again: %s", one.entry.key, error, exc_info=True)
        return False
    return True

"""The most memory in use at a time, from what torch records of its allocations."""
from __future__ import annotations

from typing import Any

from lib_onediff.engines.graphs.allocations import PIECE, most_in_use


def alloc(address: int, size: int) -> dict[str, Any]:
    return {"action": "alloc", "addr": address, "size": size}


def free(address: int) -> list[dict[str, Any]]:
    return [{"action": name, "addr": address, "size": 0} for name in ("free_requested", "free_completed")]


def test_the_most_at_a_time_and_not_the_sum() -> None:
    events = [alloc(1, 4 * PIECE), alloc(2, PIECE), *free(1), alloc(1, 3 * PIECE), *free(2), *free(1)]
    assert most_in_use(events) == 5 * PIECE


def test_what_was_there_before_does_not_count_when_it_is_freed() -> None:
    assert most_in_use([*free(7), alloc(1, PIECE), *free(8)]) == PIECE


def test_in_the_pieces_that_torch_hands_out() -> None:
    assert most_in_use([alloc(1, 1), alloc(2, PIECE + 1)]) == 3 * PIECE


def test_other_events_are_nothing() -> None:
    assert most_in_use([{"action": "segment_alloc", "addr": 1, "size": 10 * PIECE}, alloc(1, PIECE)]) == PIECE
    assert most_in_use([]) == 0

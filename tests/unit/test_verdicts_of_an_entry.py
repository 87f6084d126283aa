"""The verdicts that the entry of a shape keeps, one for each set of weights: results of comparing our output with the
host's. entry.switch_to(weights, sampling) makes their verdict the current one, whose state is COLD if there is none."""
from __future__ import annotations

import pytest
import torch
from builders import a_call, shared_unet

from lib_onediff.core.key import ShapeKey
from lib_onediff.core.table import MOST_VERDICTS, Entry, State
from lib_onediff.families.registry import FAMILIES


@pytest.fixture
def entry() -> Entry:
    unet = shared_unet("small")
    return Entry(ShapeKey.of(FAMILIES.read(unet).architecture, torch.float32, a_call(unet), "eager"))


def test_an_entry_keeps_the_verdicts_of_the_last_weights_and_drops_the_oldest(entry: Entry) -> None:
    """It keeps MOST_VERDICTS besides the current one."""
    names = [f"weights {number}" for number in range(MOST_VERDICTS + 2)]
    for name in names:
        entry.switch_to(name).state = State.PROVED
    # One is in use, and the empty one of a new entry was dropped before any of these.
    for name, state in ((names[0], State.COLD), (names[2], State.PROVED), (names[-1], State.PROVED)):
        assert entry.switch_to(name).state is state, name


def test_weights_that_return_keep_their_verdict_but_not_their_graph(entry: Entry) -> None:
    """READY (with a graph) becomes PROVED (without one), because the graph of the other weights takes its place."""
    entry.switch_to("one").state = State.READY
    assert entry.switch_to("one").state is State.READY
    assert entry.switch_to("two").state is State.COLD
    assert entry.switch_to("one").state is State.PROVED


def test_a_failed_entry_is_retried_once_in_another_sampling(entry: Entry) -> None:
    """"first" to "third" name samplings. After a second failure the entry stays FAILED."""
    entry.switch_to("one", "first").mark_failed("it fell", "first", is_final=False)
    assert entry.switch_to("one", "first").state is State.FAILED
    assert entry.switch_to("one", "second").state is State.COLD
    entry.mark_failed("it fell", "second", is_final=False)
    assert entry.switch_to("one", "third").state is State.FAILED and "it fell" in entry.reason


def test_a_shape_that_failed_outside_of_a_sampling_is_tried_again_at_the_next_call(entry: Entry) -> None:
    """Within a sampling, a failure holds until its end. Without one, the entry is COLD again at the next call."""
    entry.switch_to("one").mark_failed("the kernel failed", None, is_final=False)
    assert entry.switch_to("one").state is State.COLD

"""Measured times of a step with OneDiff and by the host, and when their ratio is shown as a speedup."""
from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import a_call, diffusers_output, shared_unet

from lib_onediff.core.key import ShapeKey
from lib_onediff.core.table import ENOUGH, Entry, Stopwatch
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.runtime import verify
from lib_onediff.runtime.rows import resolution_row
from lib_onediff.runtime.runtime import runtime
from lib_onediff.runtime.verify import why_it_differs
from lib_onediff.store.history import history_row

CPU = torch.device("cpu")
CALL = UNetCall(latent=torch.empty(2, 4, 8, 8), timestep=torch.empty(2), context=torch.empty(2, 77, 48))
KEY = ShapeKey.of("SD1", torch.float32, CALL)
SECONDS_OF_THE_FIRST = 0.2


def stopwatch(*milliseconds: float) -> Stopwatch:
    """A stopwatch with these measured times."""
    made = Stopwatch()
    for one in milliseconds:
        made.add(one / 1e3)
    return made


def an_entry(own: Stopwatch, host: Stopwatch) -> Entry:
    return Entry(KEY, "SD1", own=own, host=host)


def test_the_median_of_a_stopwatch_is_settled_after_three_times() -> None:
    """Before that, settled_ms is None."""
    assert (stopwatch().median_ms, stopwatch().settled_ms) == (None, None)
    assert (stopwatch(5.0, 7.0).median_ms, stopwatch(5.0, 7.0).settled_ms) == (6.0, None)
    assert stopwatch(5.0, 9.0, 6.0).settled_ms == 6.0


def test_a_stopwatch_forgets_earlier_times_when_the_route_changes() -> None:
    """Calls with a graph and calls without one take different times. After the change, the median is of the new times
    and not settled yet."""
    watch = Stopwatch()
    for _ in range(ENOUGH):
        watch.time(CPU, lambda: None, "plain")
    assert watch.settled_ms is not None
    watch.time(CPU, lambda: None, "graph")
    assert watch.settled_ms is None and watch.median_ms is not None


def test_a_speedup_is_shown_only_after_enough_times_with_onediff_and_of_the_host() -> None:
    """The ratio is None before that, in an entry and in the row that the Cache page shows for it."""
    few = stopwatch(1.0)
    enough = stopwatch(2.0, 2.0, 2.0)
    for own, host in ((few, enough), (enough, few), (few, few)):
        entry = an_entry(own, host)
        row = resolution_row([entry])
        assert entry.ratio is row.ratio is row.shapes[0].ratio is None
    entry = an_entry(stopwatch(2.0, 2.0, 2.5, 2.5), stopwatch(4.0, 6.0, 4.5))
    assert entry.ratio == resolution_row([entry]).ratio == 4.5 / 2.25


def test_a_time_of_few_calls_is_stored_only_if_no_speedup_can_be_computed_from_it() -> None:
    """A later process shows the quotient of the two stored times as a speedup. kept: step_ms and host_ms in the row of
    the history; None: not stored. remembered: the host's time from an earlier process."""
    few = stopwatch(1.0)
    enough = stopwatch(2.0, 2.0, 2.0)
    remembered = stopwatch()
    remembered.remembered = 2.0
    for own, host, kept in (
        (few, enough, (1.0, None)), (enough, few, (2.0, None)), (few, few, (1.0, None)), (enough, enough, (2.0, 2.0)),
        # A time that is not kept leaves an earlier process's step beside its host's.
        (few, remembered, (None, None)), (enough, remembered, (2.0, 2.0)),
    ):
        row = history_row(an_entry(own, host), 1)
        assert (row.step_ms, row.host_ms) == kept


# --- the host's time ----------------------------------------------------------------------------------------------


class Host:
    """A host's forward that counts its runs. The first run takes long."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        if self.calls == 1:
            time.sleep(SECONDS_OF_THE_FIRST)
        return torch.ones(2, 4, 8, 8)


@pytest.mark.parametrize(("seconds", "is_warm_up", "timed"), [
    (60.0, False, ENOUGH), (-1.0, False, 1), (-1.0, True, ENOUGH),
], ids=["quick", "slow", "slow, while nobody waits"])
def test_a_check_times_the_host_after_its_first_run_and_a_slow_host_only_once_while_a_user_waits(
    seconds: float, is_warm_up: bool, timed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check compares our output with the host's, and times the host. Its first run is not timed: it may load kernels,
    and takes 0.2 s here. seconds: the limit up to which the host is timed often; with -1, every host is slow. timed:
    the number of timed runs, without the first. is_warm_up: OneDiff pre-warms, so that no user waits, and a slow host
    is timed often too."""
    monkeypatch.setattr(verify, "SECONDS_TO_TIME_THE_HOST", seconds)
    entry = Entry(KEY)
    host = Host()
    why_it_differs(entry, torch.ones(2, 4, 8, 8), host, is_warm_up=is_warm_up)
    assert host.calls == 1 + timed
    assert entry.host.median_ms is not None and entry.host.median_ms < SECONDS_OF_THE_FIRST * 1e3 / 4
    assert (entry.host.settled_ms is not None) == (timed == ENOUGH)


def test_prewarming_times_the_host_at_a_shape_that_an_earlier_process_has_checked(tmp_path: Path) -> None:
    """Such a shape is not compared with the host again, so that the host would never be timed. It is timed while
    OneDiff pre-warms, and not in a user's call. calls: the number of the host's runs."""
    unet = shared_unet("SD1")
    host = Host()
    call = a_call(unet)

    def run() -> None:
        with torch.no_grad():
            runtime.run(unet, call, lambda: (host(), diffusers_output(unet, call))[1])

    runtime.history.open(tmp_path)
    runtime.adopt(unet)
    try:
        with runtime.warming_up():
            run()
        (entry,) = runtime.table.entries()
        runtime.history.keep_verdict(entry)
        for is_warm_up, calls in ((False, 0), (True, ENOUGH)):
            runtime.table.forget({entry.key})
            host.calls = 0
            with runtime.warming_up() if is_warm_up else contextlib.nullcontext():
                run()
            assert host.calls == calls
    finally:
        runtime.release(unet)

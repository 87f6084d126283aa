"""Whether steps are slower than they were: than usual, or since an update; and never a guess where nobody knows."""
from __future__ import annotations

from pathlib import Path

from store_builders import opened
from test_history import KEY

from lib_onediff.core.table import Entry, State, Verdict
from lib_onediff.runtime.rows import rows_of
from lib_onediff.runtime.step_times import StepTimes, time_name

VERSIONS = {"torch": "2.9.0", "the driver": "580.1"}


def entry_at(ms: float, count: int = 3) -> Entry:
    entry = Entry(KEY, "SD1", verdict=Verdict(State.READY))
    entry.own._times.extend([ms] * count)
    entry.host.remembered = 60.0
    return entry


def process(folder: Path, versions: dict[str, str] = VERSIONS) -> StepTimes:
    times = StepTimes(opened(folder))
    times.open(versions)
    return times


def reason_at(times: StepTimes, ms: float) -> str:
    slower = times.slower(entry_at(ms))
    return slower.reason if slower else ""


def test_a_time_under_another_load_is_told_and_not_compared(tmp_path: Path) -> None:
    first = process(tmp_path)
    assert reason_at(first, 30.0) == ""
    first.note([entry_at(30.0), entry_at(900.0, count=2)])
    # What a loaded image took does not become what is usual.
    first.note([entry_at(60.0)])
    first._history.commit()
    later = process(tmp_path)
    assert reason_at(later, 31.0) == ""
    loaded = entry_at(45.0)
    assert reason_at(later, 45.0).startswith("slower than usual (45 ms, usually 30 ms)")
    (row,), (alone,) = rows_of([loaded], step_times=later), rows_of([loaded])
    assert row.ratio is None and "slower than usual" in row.reason and alone.ratio == 60 / 45


def test_an_update_that_makes_steps_slower_is_named(tmp_path: Path) -> None:
    before = process(tmp_path)
    before.note([entry_at(30.0)])
    before._history.commit()
    after = process(tmp_path, {**VERSIONS, "torch": "2.10.0"})
    # Nothing is known of the new versions yet.
    assert reason_at(after, 36.0) == ""
    after.note([entry_at(36.0)])
    assert reason_at(after, 36.0) == (
        "slower since the update of torch (2.9.0 to 2.10.0): 36 ms a step, before 30 ms"
    )
    (row,) = rows_of([entry_at(36.0)], step_times=after)
    assert row.ratio == 60 / 36
    after.note([entry_at(29.0)])
    assert reason_at(after, 29.0) == ""


def test_a_purge_forgets_it_and_what_others_wrote_is_nothing(tmp_path: Path) -> None:
    times = process(tmp_path)
    times.note([entry_at(30.0)])
    name = time_name(entry_at(30.0))
    assert times._history.time_of(name)["ms"] == 30.0
    times._history.forget({"512x512"}, "SD1", {"sd1"})
    assert times._history.time_of(name) is None
    for value in ({"ms": "30", "by": {}}, [1], {"ms": -1.0, "by": {}}, None):
        times._history.time(name, value)
        assert times.slower(entry_at(90.0)) is None

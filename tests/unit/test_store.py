"""The store on disk (sizes that were used, pins and measured choices) keeps what was written: for the next process,
with several threads and processes writing at once, and if a process is killed at any moment."""
from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from store_builders import FILE, opened, row, uses

from lib_onediff.core.card import TuningCache
from lib_onediff.store import history as history_module
from lib_onediff.store.history import History
from lib_onediff.store.store import LIMITS

# How often a writer is killed, at random moments; each takes about 40 ms. The nightly run sets 200.
KILLS = int(os.environ.get("ONEDIFF_TEST_KILLS", "25"))
FORK = multiprocessing.get_context("fork") if hasattr(os, "fork") else multiprocessing.get_context()
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="starts its processes by fork")


def test_uses_are_summed_and_later_values_replace_earlier_ones(tmp_path: Path) -> None:
    """Three rows of one size are recorded. The one recorded last is the latest, even if its time is earlier. A value
    that a later row lacks is kept."""
    history = opened(tmp_path)
    history.record(row(last_used=10.0, step_ms=5.0, relative_error=1e-3))
    history.commit()
    history.record(row(last_used=20.0, step_ms=9.0, host_ms=8.0))
    # As if the clock had been set back.
    history.record(row(last_used=5.0, step_ms=4.0))
    assert history.rows() == opened(tmp_path).rows() == [
        row(uses=3, last_used=5.0, step_ms=4.0, host_ms=8.0, relative_error=1e-3)
    ]


def test_only_the_most_recently_used_rows_are_kept(tmp_path: Path) -> None:
    """With 50 rows more than the limit, the 50 rows that were used least recently are deleted. A purge then makes the
    file small again."""
    most = LIMITS[0][-1]
    history = opened(tmp_path)
    for number in range(most + 50):
        history.record(row(f"{number}x8", last_used=float(number)))
        if number % 1000 == 0:
            history.commit()
    assert sorted(found.last_used for found in history.rows()) == [float(number) for number in range(50, most + 50)]
    full = history.size_bytes()
    history.forget()
    assert history.size_bytes() < full / 10, "a purge makes the file small again"


def test_no_use_is_lost_while_four_threads_record_and_another_commits(tmp_path: Path) -> None:
    """rows() commits what was recorded, and then reads it. The sum of the uses is as recorded, also in the next
    process."""
    history = opened(tmp_path)
    stop = threading.Event()

    def commit() -> None:
        while not stop.is_set():
            history.rows()

    def record() -> None:
        for _ in range(500):
            history.record(row())

    with ThreadPoolExecutor(5) as threads:
        committer, *workers = (threads.submit(work) for work in (commit, *[record] * 4))
        wait(workers)
        stop.set()
        committer.result()
    assert uses(history) == uses(opened(tmp_path)) == {"512x512": 2000}


# --- several processes ------------------------------------------------------------------------------------------------


def write_until_killed(folder: Path, first: int, sender: Connection) -> None:
    """The writer's process: send None, then write the data for each number, beginning with first, and send the
    number."""
    sender.send(None)
    history = History()
    history.open(folder)
    for number in range(first, first + 100_000):
        history.record(row(relative_error=float(number), last_used=float(number)))
        history.record(row(f"{number % 50}x8", uses=3))
        history.tune("image", number)
        history.pin("SD1", f"{number}x{number}", True)
        sender.send(number)
        if number % 5 == 0:
            # A purge may be interrupted as well.
            history.forget(["49x8"])


@forks
def test_a_process_killed_at_any_moment_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    """The writer commits the data of each number, and then reports the number. After each kill, the file has every
    commit that was reported, and at most one more, each of them complete. KILLS: how many writers are killed."""
    chance = random.Random(5)
    expected = after_a_write = 0
    for _ in range(KILLS):
        receiver, sender = FORK.Pipe(duplex=False)
        process = FORK.Process(target=write_until_killed, args=(tmp_path, expected + 1, sender))
        process.start()
        sender.close()
        # The first line means that the process runs.
        received = [receiver.recv() for _ in range(chance.randrange(1, 4))]
        time.sleep(chance.uniform(0, 0.02))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        with contextlib.suppress(EOFError):
            while receiver.poll():
                received.append(receiver.recv())
        receiver.close()
        answered = received[-1]
        after_a_write += answered is not None

        history = opened(tmp_path)
        assert history.trouble is None
        rows = {found.resolution: found for found in history.rows()}
        written = rows["512x512"].uses if rows else 0
        # The last commit may have happened without the test knowing it.
        assert (answered or expected) <= written <= (answered or expected) + 1
        if written:
            # The data of one image is there together.
            assert rows["512x512"].relative_error == written and history.tuned() == {"image": written}
        assert history.pins() == {("SD1", f"{number}x{number}") for number in range(1, written + 1)}
        history.close()
        expected = written
    assert after_a_write, "they must have been killed while they were at work"
    assert [file.name for file in tmp_path.glob("*.sqlite3")] == [FILE], "nothing was set aside"


def open_and_write(folder: Path, name: str, go: float, sender: Connection) -> None:
    """A process that opens the store at the time go, sends whether it found the file damaged, and writes data."""
    time.sleep(max(0.0, go - time.monotonic()))
    history = History()
    history.open(folder)
    noticed = history.trouble is not None
    for number in range(15):
        history.record(row())
        history.pin(name, f"{number}x8", True)
        assert history.rows()[0].uses > number
    history.record(row("64x64"))
    sender.send(noticed)
    # As at the end of a process.
    history.close()


@forks
@pytest.mark.parametrize("is_damaged", [False, True])
def test_processes_that_open_the_store_at_once_share_one_file_and_lose_nothing(
    tmp_path: Path, is_damaged: bool
) -> None:
    """The four processes find no file, or a damaged one: they make one new file together, and the damaged one is kept
    beside it. Each writes uses and pins, and one more use that is still pending when it closes the store at its end.
    is_damaged: whether there is a damaged file."""
    names = ["one", "two", "three", "four"]
    for attempt in range(2):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        if is_damaged:
            (folder / FILE).write_bytes(random.Random(attempt).randbytes(9000))
        receiver, sender = FORK.Pipe(duplex=False)
        go = time.monotonic() + 0.05
        processes = [FORK.Process(target=open_and_write, args=(folder, name, go, sender)) for name in names]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0
        assert any(receiver.recv() for _ in processes) == is_damaged
        assert len(list(folder.glob("*.sqlite3"))) == 1 + is_damaged, "all of them go on in the same file"
        history = opened(folder)
        assert uses(history) == {"512x512": 15 * 4, "64x64": 4}
        assert history.pins() == {(name, f"{number}x8") for name in names for number in range(15)}


def test_a_purge_deletes_the_files_of_older_versions_and_not_those_of_newer_ones(tmp_path: Path) -> None:
    """The first number in a file's name is the version of its format; this release's is 2. Pins of this version
    stay."""
    newer = ["onediff-3-1.sqlite3", "onediff-10-2.sqlite3-wal", "onediff-3-1.sqlite3-journal"]
    older = ["onediff-1-9.sqlite3", "onediff-1-9.sqlite3-wal", "onediff-2-0.sqlite3"]
    for name in (*newer, *older, "notes.txt"):
        (tmp_path / name).write_bytes(b"x" * 100)
    history = opened(tmp_path)
    history.pin("SD1", "8x8", True)
    assert history.is_shared_with_newer
    before = history.size_bytes()
    history.forget()
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([*newer, "notes.txt", FILE])
    assert before - history.size_bytes() >= 300 and history.pins() == {("SD1", "8x8")}
    assert not opened(tmp_path / "another").is_shared_with_newer


def test_concurrent_threads_start_one_writer_and_lose_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer is a timer's thread, which the first record starts. Eight threads record measured choices at once. In
    an earlier version, a second thread started another timer while the first was being made, which takes 50 ms here."""
    made: list[threading.Timer] = []

    class SlowTimer(threading.Timer):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

        def start(self) -> None:
            time.sleep(0.05)
            super().start()

    history = opened(tmp_path)
    # In the history's module only: histories of other tests may still write.
    monkeypatch.setattr(history_module, "threading", SimpleNamespace(**{**vars(threading), "Timer": SlowTimer}))
    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(history.tune, f"tile {number}", number) for number in range(40)]:
            done.result()
    assert len(made) == 1 and len(history.tuned()) == 40
    made[0].cancel()
    history.close()
    assert len(opened(tmp_path).tuned()) == 40


def test_data_is_written_at_the_end_when_python_starts_no_more_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timer that would write the data cannot be started at the interpreter's shutdown. close() writes it."""
    class NoTimer(threading.Timer):
        def start(self) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

    history = opened(tmp_path)
    monkeypatch.setattr(history_module, "threading", SimpleNamespace(**{**vars(threading), "Timer": NoTimer}))
    history.tune("tile", 64)
    history.close()
    assert opened(tmp_path).tuned() == {"tile": 64}


def test_no_tuned_choice_is_lost_that_is_set_while_a_store_is_being_attached() -> None:
    """A tuning cache saves its choices in the attached store. 4000 choices are set in threads while it is attached 50
    times: afterwards, the store has all of them."""
    cache = TuningCache()
    saved = dict[str, Any]()
    with ThreadPoolExecutor(4) as threads:
        chosen = [threads.submit(cache.set, f"{number}", number) for number in range(2000)]
        attached = [threads.submit(cache.attach, saved.copy, saved.__setitem__) for _ in range(50)]
        chosen += [threads.submit(cache.set, f"{number}", number) for number in range(2000, 4000)]
        for done in (*chosen, *attached):
            done.result()
    assert saved == {f"{number}": number for number in range(4000)}
    assert all(cache.get(name) == value for name, value in saved.items())

"""The store where nothing goes wrong: what is recorded is there, in another Store and after a restart."""
from __future__ import annotations

import dataclasses
import math
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import lib_onediff
from lib_onediff.store.machine import Fingerprint, source_digest
from lib_onediff.store.rows import CHOSEN, TUNED, VERDICTS, HistoryRow, PurgeFilter
from lib_onediff.store.store import Store

MACHINE = Fingerprint("a GPU", "580.1", "2.9.0", "3.5.0", "0.1.0")
OpenStore = Callable[..., Store]


@pytest.fixture
def open_store() -> Iterator[OpenStore]:
    stores: list[Store] = []

    def opened(folder: Path, machine: Fingerprint = MACHINE, **options: int) -> Store:
        stores.append(Store.open(folder, machine, **options))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


def row(resolution: str = "512x512", architecture: str = "sd1", **values: float | None) -> HistoryRow:
    return HistoryRow(architecture, "SD1", resolution, 2, 77, "float16", **values)  # type: ignore[arg-type]


def test_what_was_flushed_is_there_after_a_restart(tmp_path: Path, open_store: OpenStore) -> None:
    used = row(uses=20, last_used=1000.0, step_ms=11.5, host_ms=23.0, relative_error=1e-3)
    store = open_store(tmp_path / "made" / "on the way")
    assert store.trouble is None and store.on_disk and store.history() == []
    store.record(used)
    assert store.history() == [used], "a row is seen before it is written"
    assert store.flush()
    assert store.history() == [used]
    again = open_store(store.folder)
    assert again.history() == [used] and again.history()[0].ratio == 2.0
    assert again.trouble is None


def test_uses_add_up_and_what_is_known_later_wins(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path)
    store.record(row(last_used=10.0, step_ms=5.0, relative_error=1e-3))
    store.flush()
    store.record(row(last_used=20.0, step_ms=9.0, host_ms=8.0))
    # The clock was set back: what is recorded later counts, whatever it says.
    store.record(row(last_used=5.0, step_ms=4.0))
    expected = row(uses=3, last_used=5.0, step_ms=4.0, host_ms=8.0, relative_error=1e-3)
    assert store.history() == [expected]
    store.flush()
    assert store.history() == [expected] == open_store(tmp_path).history()


def test_every_part_of_a_shape_tells_rows_apart(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path)
    first = row(last_used=1.0)
    others = [("architecture", "sdxl"), ("model", "SDXL"), ("resolution", "64x64"), ("batch", 4), ("tokens", 154),
              ("dtype", "float32")]
    rows = [first, *(dataclasses.replace(first, **{name: value}) for name, value in others)]
    for one in rows:
        store.record(one)
    store.flush()
    assert {found.shape for found in open_store(tmp_path).history()} == {one.shape for one in rows}
    assert len(rows) == 7


def test_the_most_used_come_first(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path)
    for resolution, uses, last_used in (("1x1", 5, 1.0), ("2x2", 9, 1.0), ("3x3", 5, 2.0)):
        store.record(row(resolution, uses=uses, last_used=last_used))
    store.record(row("4x4", "sdxl", uses=7))
    store.flush()
    store.record(row("1x1", uses=1, last_used=3.0))
    assert [found.resolution for found in store.history()] == ["2x2", "4x4", "1x1", "3x3"]


@pytest.mark.parametrize("part", [part.name for part in dataclasses.fields(Fingerprint)])
def test_another_machine_has_findings_of_its_own(tmp_path: Path, open_store: OpenStore, part: str) -> None:
    store, other = open_store(tmp_path), open_store(tmp_path, dataclasses.replace(MACHINE, **{part: "another"}))
    store.record(row())
    store.save(TUNED, "tile", 64)
    store.save(CHOSEN, "pinned", ["512x512"])
    store.flush()
    assert other.history() == [] and other.saved(TUNED) == {}
    assert other.saved(CHOSEN) == {"pinned": ["512x512"]}, "what users chose holds everywhere"
    other.record(row("64x64"))
    other.flush()
    assert [found.resolution for found in store.history()] == ["512x512"]
    assert [found.resolution for found in other.history()] == ["64x64"]


def test_findings_are_json_by_kind_and_name(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path)
    expected = {"conv 320x320": {"block": [64, 128], "warps": 4, "why": "größer"}, "layout": "nhwc"}
    for name, value in expected.items():
        store.save(TUNED, name, value)
    store.save(VERDICTS, "layout", 1e-3)
    assert store.saved(TUNED) == expected
    assert store.flush()
    assert open_store(tmp_path).saved(TUNED) == expected
    store.save(TUNED, "layout", None)
    assert store.saved(TUNED)["layout"] is None
    store.flush()
    assert open_store(tmp_path).saved(TUNED)["layout"] is None
    assert open_store(tmp_path).saved(VERDICTS) == {"layout": 1e-3}
    with pytest.raises(TypeError):
        store.save(TUNED, "no JSON", object())
    assert store.flush()


def test_forget_takes_resolutions_written_or_not(tmp_path: Path, open_store: OpenStore) -> None:
    def resolutions() -> list[str]:
        return sorted(found.resolution for found in store.history())

    store, other = open_store(tmp_path), open_store(tmp_path, dataclasses.replace(MACHINE, torch="2.8.0"))
    other.record(row("512x512"))
    other.flush()
    for resolution in ("512x512", "64x64", "72x88"):
        store.record(row(resolution))
    store.save(TUNED, "layout", "nhwc")
    store.flush()
    store.record(row("64x64", "sdxl"))
    store.forget(PurgeFilter(["nothing like it"]))
    assert resolutions() == ["512x512", "64x64", "64x64", "72x88"]
    store.forget(PurgeFilter({"64x64"}))
    assert resolutions() == ["512x512", "72x88"]
    store.forget(PurgeFilter(["512x512"]))
    assert resolutions() == ["72x88"] and store.saved(TUNED) == {"layout": "nhwc"}
    assert other.history() == [], "of every fingerprint in the folder"
    store.forget(PurgeFilter())
    assert store.history() == [] and store.saved(TUNED) == {}
    assert open_store(tmp_path).history() == []


def test_forgetting_everything_takes_the_stores_of_earlier_versions(tmp_path: Path, open_store: OpenStore) -> None:
    for name in ("onediff-1.sqlite3", "onediff-1.lock", "others.txt"):
        (tmp_path / name).write_bytes(bytes(1000))
    store = open_store(tmp_path)
    assert store.history() == [] and store.trouble is None and store.size_bytes() > 2000
    store.forget(PurgeFilter())
    assert sorted(file.name for file in tmp_path.iterdir()) == [store.path.name, "others.txt"]


def test_forgetting_everything_gives_the_disk_back(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path)
    empty = store.size_bytes()
    assert 0 < empty < 64 << 10
    for number in range(3000):
        store.record(row(f"{number}x8"))
    store.flush()
    assert store.size_bytes() > 4 * empty
    store.forget(PurgeFilter())
    assert store.size_bytes() <= empty


def test_the_size_limit_costs_the_least_recently_used(tmp_path: Path, open_store: OpenStore) -> None:
    limit = 96 << 10
    store = open_store(tmp_path, size_limit=limit)
    store.save(TUNED, "layout", "nhwc")
    for picture in range(40):
        for number in range(50):
            store.record(row(f"{number}x{picture}", last_used=1000.0 * picture + number))
        assert store.flush()
        assert store.size_bytes() <= limit
    kept = [found.last_used for found in store.history()]
    assert 200 < len(kept) < 2000
    assert min(kept) == sorted(1000.0 * picture + number for picture in range(40) for number in range(50))[-len(kept)]
    assert store.saved(TUNED) == {"layout": "nhwc"}, "what was tuned is not history"


def test_findings_that_updates_leave_behind_cost_no_history(tmp_path: Path, open_store: OpenStore) -> None:
    for version in range(40):
        store = open_store(tmp_path, dataclasses.replace(MACHINE, onediff=f"0.1.0 {version}"), size_limit=100_000)
        store.record(row(f"{version}x8"))
        for number in range(20):
            store.save(TUNED, f"tile {number}", "x" * 200)
        assert store.flush()
        store.close()
    store = open_store(tmp_path, dataclasses.replace(MACHINE, onediff="0.1.0 39"), size_limit=100_000)
    assert len(store.saved(TUNED)) == 20 and [seen.resolution for seen in store.history()] == ["39x8"]


def test_memory_is_limited_too(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = Store.open(tmp_path / "file", MACHINE)
    for number in range(10_000):
        store.record(row(f"{number}x8", last_used=float(number)))
    kept = [found.last_used for found in store.history()]
    assert 3000 < len(kept) <= 4096 and max(kept) == 9999.0 and min(kept) == 10_000.0 - len(kept)
    store.close()


def test_values_that_are_no_ordinary_numbers_or_text(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path)
    store.record(dataclasses.replace(row(), model="caf\udce9 ü 模型", relative_error=math.nan))
    assert store.flush()
    (found,) = open_store(tmp_path).history()
    assert found.model == "caf? ü 模型"
    assert found.relative_error == math.inf, "a verdict that is not a number is as bad as can be, not unknown"


def test_threads_record_while_another_flushes(tmp_path: Path, open_store: OpenStore) -> None:
    store, stop = open_store(tmp_path), threading.Event()

    def work(number: int) -> None:
        for _ in range(500):
            store.record(row())
            store.record(row(f"{number}x8"))

    def flush() -> None:
        while not stop.is_set():
            store.flush()
            store.history()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    flusher = threading.Thread(target=flush)
    for thread in (flusher, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    flusher.join()
    store.flush()
    assert {found.resolution: found.uses for found in open_store(tmp_path).history()} == {
        "512x512": 2000, "0x8": 500, "1x8": 500, "2x8": 500, "3x8": 500,
    }


def test_what_is_left_is_written_at_exit(tmp_path: Path, open_store: OpenStore) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from lib_onediff.store.store import HistoryRow, Store\n"
        "store = Store.open(Path(sys.argv[1]))\n"
        "store.record(HistoryRow('sd1', 'SD1', '64x64', 2, 77, 'float16'))\n"
        "raise SystemExit('and not a flush')\n"
    )
    folder = Path(lib_onediff.__file__).parents[1]
    left = subprocess.run([sys.executable, "-c", script, tmp_path], cwd=folder, capture_output=True, text=True)
    assert left.stderr == "and not a flush\n"
    assert [found.resolution for found in open_store(tmp_path, Fingerprint.of()).history()] == ["64x64"]


def test_the_fingerprint_of_the_cpu_and_of_this_machine() -> None:
    cpu = Fingerprint.of(torch.device("cpu"))
    assert (cpu.gpu, cpu.driver) == ("cpu", "none")
    assert (cpu.torch, cpu.onediff) == (torch.__version__, f"{lib_onediff.__version__} {source_digest()}")
    assert Fingerprint.of() == (Fingerprint.of(torch.device("cuda")) if torch.cuda.is_available() else cpu)


def test_the_digest_is_that_of_the_sources_that_compute(tmp_path: Path) -> None:
    def digest(changes: dict[str, str]) -> str:
        for name, text in changes.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return source_digest.__wrapped__(tmp_path)

    first = digest({"ops/torch_ops.py": "geglu", "accelerator.py": "run", "ui/page.py": "page", "notes.txt": "text"})
    assert digest({"ui/page.py": "another page", "bench/clock.py": "tick", "notes.txt": ""}) == first
    assert digest({"ops/__pycache__/torch_ops.py": "by a compiler"}) == first
    changes = {"ops/torch_ops.py": "geglu + 1"}, {"new/layer.py": ""}, {"new/layer.py": "1"}
    assert len({first, *map(digest, changes)}) == 4
    (tmp_path / "ops" / "torch_ops.py").write_text("geglu")
    shutil.rmtree(tmp_path / "new")
    assert digest({}) == first


@pytest.mark.gpu
def test_the_fingerprint_of_a_gpu() -> None:
    gpu = Fingerprint.of()
    assert gpu.gpu == torch.cuda.get_device_name()
    assert gpu.driver[:1].isdigit() and "." in gpu.driver

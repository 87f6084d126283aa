"""The history that OneDiff keeps between processes: how often sizes were used and their times, verdicts (the results of
comparisons with the host), tuned choices and pins."""
from __future__ import annotations

import dataclasses
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import a_call, diffusers_output, diffusers_unet, served, shared_unet
from store_builders import FILE, checked, opened, row, uses

import lib_onediff
from lib_onediff.core.key import ShapeKey
from lib_onediff.core.table import Entry
from lib_onediff.runtime.cache import Fingerprint, source_digest
from lib_onediff.runtime.runtime import runtime
from lib_onediff.store.history import History

KEY = ShapeKey(
    architecture="sd1", height=64, width=64, batch=2, tokens=77, dtype=torch.float16, latent_dtype=torch.float16,
    device=torch.device("cuda", 0), inputs=(), own_inputs=(), upcast_attention=False,
)


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A cache folder with the history of five calls: four of 64x64, one of 88x72."""
    unet = shared_unet("small")
    runtime.history.open(tmp_path)
    lib_onediff.compile_unet(unet)
    for _ in range(4):
        served(unet, a_call(unet, 8, 8))
    served(unet, a_call(unet, 9, 11))
    runtime.keep_history()
    lib_onediff.uncompile_unet(unet)
    return tmp_path


# --- uses and times ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("host_timed_often")
def test_rows_are_read_by_the_next_process(used: Path) -> None:
    """A second History on the same folder stands for the next process. The fixture's five calls are written twice and
    counted once. Times and ratios are kept for sizes with more than one call."""
    now = {found.resolution: found for found in runtime.rows()}
    runtime.keep_history()  # Uses that were counted are not counted again.
    assert uses(opened(used)) == {"64x64": 4, "88x72": 1}
    runtime.table.forget({entry.key for entry in runtime.table.entries()})
    remembered = {found.resolution: found for found in runtime.rows()}
    assert {found.state for found in remembered.values()} == {"on disk"}
    assert remembered["64x64"].step_ms == now["64x64"].step_ms > 0
    assert remembered["64x64"].ratio == now["64x64"].ratio > 0
    # The time of a single call is not kept.
    assert remembered["88x72"].step_ms is remembered["88x72"].ratio is None
    assert remembered["64x64"].shapes[0].dtype == "float32"


def test_without_a_folder_history_lasts_for_the_process() -> None:
    """Verdicts and pins are kept in memory. forget() drops the verdicts and keeps the pins."""
    history = History()
    history.keep([])
    history.keep_verdict(checked(KEY))
    history.pin("SD1", "512x512", True)
    assert history.recall(checked(KEY)) and history.pins() == {("SD1", "512x512")}
    history.forget()
    assert not history.recall(checked(KEY)) and history.pins() == {("SD1", "512x512")}
    assert history.rows() == [] and history.trouble is None and history.size_bytes() == 0


# --- machines and versions --------------------------------------------------------------------------------------------


def test_times_and_verdicts_of_another_machine_or_version_are_not_used(tmp_path: Path) -> None:
    """A Fingerprint identifies the machine and the versions; a change of any field changes its digest. Times, verdicts
    and tuned choices are kept by digest. Uses and pins are shared by all machines, and a purge deletes for all."""
    here = Fingerprint.of()
    others = [dataclasses.replace(here, **{part.name: "another"}) for part in dataclasses.fields(Fingerprint)]
    assert len({here.digest, *(other.digest for other in others)}) == 1 + len(others)
    before = opened(tmp_path, others[0].digest)
    before.record(row(uses=30, step_ms=9.0))
    before.tune("tile", 64)
    before.keep_verdict(checked(KEY))
    before.pin("SD1", "512x512", True)
    history = opened(tmp_path)
    assert history.rows() == [] and history.tuned() == {} and not history.recall(checked(KEY))
    assert [found.uses for found in history.rows(every_machine=True)] == [30] and history.pins() == {("SD1", "512x512")}
    history.record(row(uses=4))
    assert [found.uses for found in history.rows(every_machine=True)] == [34]
    history.forget(["512x512"])
    assert opened(tmp_path).rows(every_machine=True) == [] == before.rows(), "a purge is of every machine"


def test_a_history_written_by_onediff_0_2_0_is_read(tmp_path: Path) -> None:
    """OneDiff 0.2.0 had the same tables, but wrote all pins as one list."""
    history = opened(tmp_path)
    history.record(row())
    history.close()
    connection = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    connection.execute("INSERT INTO finding VALUES ('', 'chosen', 'pinned', ?)",
                       ('[["SD1", "512x512"], ["SDXL refiner", "64x64"]]',))
    connection.close()
    history = opened(tmp_path)
    assert history.rows() == [row()]
    assert history.pins() == {("SD1", "512x512"), ("SDXL refiner", "64x64")}
    history.pin("SDXL refiner", "64x64", False)
    history.pin("SD2 v", "72x72", True)
    assert opened(tmp_path).pins() == {("SD1", "512x512"), ("SD2 v", "72x72")}


def test_the_source_digest_changes_with_code_that_affects_images_and_not_with_other_files(tmp_path: Path) -> None:
    """Files that do not affect an image: ui/, bench/, __pycache__/, and all that are not Python code."""

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
    assert Fingerprint.of().onediff == f"{lib_onediff.__version__} {source_digest()}"


# --- verdicts ---------------------------------------------------------------------------------------------------------


def test_a_purge_deletes_the_named_resolutions_of_the_named_model_and_no_others(tmp_path: Path) -> None:
    """Their rows and verdicts are deleted in this process and for later ones, also a verdict that is not written yet. %
    and _, wildcards of SQL, have no effect. Tuned choices stay."""
    history = opened(tmp_path)
    keys = {(model, width): dataclasses.replace(KEY, architecture=f"of-{model}", width=width)
            for model in ("SD1", "SDXL") for width in (64, 72)}
    for (model, _), key in keys.items():
        history.keep([Entry(key, model, uses=3)])
        history.keep_verdict(checked(key))
    history.tune("tile", 64)
    history.commit()
    late = dataclasses.replace(keys["SD1", 64], backend="cudagraph")
    history.keep_verdict(checked(late))
    left = set(keys)
    for resolutions, model, gone in (
        (["8x8", "%", "512x51_"], None, set()), (["512x512"], "SD1", {("SD1", 64)}),
        (["576x512"], None, {("SD1", 72), ("SDXL", 72)}), (None, "SDXL", {("SDXL", 64)}),
    ):
        history.forget(resolutions, model=model)
        left -= gone
        for known in (history, opened(tmp_path)):
            assert {name for name in keys if known.recall(checked(keys[name]))} == left
            assert {(found.model, int(found.resolution[:3]) // 8) for found in known.rows()} == left
            assert known.recall(checked(late)) == (("SD1", 64) in left)
            assert known.tuned() == {"tile": 64}
    history.keep([Entry(keys["SDXL", 64], "SDXL", uses=3)])
    assert [found.uses for found in history.rows()] == [3], "its uses count from the first again"


@pytest.mark.usefixtures("host_timed_often")
def test_the_next_process_does_not_check_a_size_again_and_reports_the_same_error_and_host_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both "processes" are this one, with a new History of the same cache folder. In the second, the host's forward
    never runs."""
    unet = diffusers_unet()
    call = a_call(unet)
    asked: list[None] = []

    def host() -> torch.Tensor:
        asked.append(None)
        return diffusers_output(unet, call)

    def one_call() -> dict[str, Any]:
        monkeypatch.setattr(runtime.services, "history", opened(tmp_path))
        runtime.table.forget({entry.key for entry in runtime.table.entries()})  # as at the start of a process
        runtime.adopt(unet)
        with torch.no_grad():
            # So often that both have enough times for a ratio; fewer are not kept.
            for _ in range(6):
                runtime.run(unet, call, host)
        runtime.keep_history()
        return runtime.status()

    first = one_call()
    times_asked = len(asked)
    assert first["route"] == "plain" and times_asked and first["host_ms"]
    second = one_call()
    assert second["route"] == "plain" and len(asked) == times_asked
    assert second["relative_error"] == first["relative_error"]
    assert second["host_ms"] == pytest.approx(first["host_ms"])

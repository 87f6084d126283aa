"""What was used is remembered between processes, without anybody waiting for a disk."""
from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from builders import a_call, served, shared_unet

import lib_onediff
from lib_onediff.accelerator import runtime
from lib_onediff.shapes.history import History


def wait_for_the_disk() -> None:
    for thread in threading.enumerate():
        if thread.name == "onediff-history":
            thread.join()


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A cache folder in which one picture's calls were taken down."""
    unet = shared_unet("SD1")
    runtime.history.open(tmp_path)
    lib_onediff.compile_unet(unet)
    for _ in range(3):
        served(unet, a_call(unet, 8, 8))
    served(unet, a_call(unet, 9, 11))
    runtime.keep_history()
    wait_for_the_disk()
    lib_onediff.uncompile_unet(unet)
    return tmp_path


def test_the_next_process_has_the_rows(used: Path) -> None:
    now = {row.resolution: row for row in runtime.rows()}
    later = History()
    later.open(used)
    assert {row.resolution: row.uses for row in later.rows()} == {"64x64": 3, "88x72": 1}
    runtime.table.forget({entry.key for entry in runtime.table.entries()})
    remembered = {row.resolution: row for row in runtime.rows()}
    assert {row.state for row in remembered.values()} == {"on disk"}
    assert remembered["64x64"].step_ms == now["64x64"].step_ms
    assert remembered["64x64"].shapes[0].dtype == "float32"


def test_a_use_is_counted_once(used: Path) -> None:
    runtime.keep_history()
    wait_for_the_disk()
    assert sum(row.uses for row in runtime.history.rows()) == 4


def test_purging_forgets_the_disk_too(used: Path) -> None:
    runtime.purge(["64x64"])
    later = History()
    later.open(used)
    assert [row.resolution for row in later.rows()] == ["88x72"]
    runtime.purge()
    assert later.rows() == [] and runtime.rows() == []


def test_uses_after_a_purge_are_counted_from_one(used: Path) -> None:
    unet = shared_unet("SD1")
    runtime.purge(["64x64"])
    lib_onediff.compile_unet(unet)
    with torch.no_grad():
        served(unet, a_call(unet, 8, 8))
    lib_onediff.uncompile_unet(unet)
    runtime.keep_history()
    wait_for_the_disk()
    assert {row.resolution: row.uses for row in runtime.history.rows()} == {"64x64": 1, "88x72": 1}


def test_without_a_folder_nothing_is_remembered_and_nothing_fails() -> None:
    history = History()
    history.keep([])
    history.forget()
    assert history.rows() == [] and history.trouble is None and history.size_bytes() == 0


def test_a_folder_that_cannot_be_used_is_a_sentence(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    history = History()
    history.open(blocked / "below")
    assert history.trouble and "\n" not in history.trouble

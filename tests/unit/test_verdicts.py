"""Verdicts of first uses: kept across processes, told apart by all that makes a shape, and forgotten when purged."""
from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import LDM_UNET, a_call, diffusers_output, diffusers_unet

import lib_onediff
from lib_onediff.runtime.runtime import runtime
from lib_onediff.shapes.key import ShapeKey
from lib_onediff.store import history as history_module
from lib_onediff.store.history import History, verdict_name
from lib_onediff.store.machine import Fingerprint
from lib_onediff.store.rows import TUNED, VERDICTS, HistoryRow, NotKept, PurgeFilter
from lib_onediff.store.store import Store

WEIGHTS = "weights and sources"
KEY = ShapeKey(
    architecture="sd1", height=64, width=64, batch=2, tokens=77, dtype=torch.float16, latent_dtype=torch.float16,
    device=torch.device("cuda", 0), inputs=(), control=(), upcast_attention=False,
)
OTHERS: list[dict[str, Any]] = [
    {"architecture": "sdxl"}, {"height": 128}, {"width": 72}, {"height": 32, "width": 128}, {"batch": 1},
    {"tokens": 154}, {"dtype": torch.bfloat16}, {"latent_dtype": torch.float32}, {"device": torch.device("cpu")},
    {"device": torch.device("cuda", 1)}, {"inputs": ("y",)}, {"control": ((2, 4, 64, 64), (), ())},
    {"control": (None, (), ())}, {"upcast_attention": True}, {"backend": "eager"},
    {"precision": (("TF32 in matmul", True),)}, {"part": "full"}, {"depth": 3},
    {"patches": ("patches[attn2_patch] by somebody",)}, {"additions": ("FreeU at stages 0",)},
]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "WRITE_AFTER_SECONDS", 0.05)


def opened(folder: Path) -> History:
    for thread in threading.enumerate():
        if thread.name == "onediff-history":
            thread.join()
    history = History()
    history.open(folder)
    return history


def test_a_verdict_is_known_at_once_and_in_the_next_history(tmp_path: Path) -> None:
    history = opened(tmp_path)
    assert history.verdict("native", KEY, WEIGHTS) is None
    history.keep_verdict("native", KEY, WEIGHTS, 1.25e-3)
    assert history.verdict("native", KEY, WEIGHTS) == 1.25e-3
    history.keep_verdict("native", KEY, WEIGHTS, 2e-3)
    assert opened(tmp_path).verdict("native", dataclasses.replace(KEY), WEIGHTS) == 2e-3


@pytest.mark.parametrize(("backend", "change"), [("cudagraph", {}), *(("native", change) for change in OTHERS)])
def test_another_shape_or_backend_is_another_verdict(tmp_path: Path, backend: str, change: dict[str, Any]) -> None:
    other = dataclasses.replace(KEY, **change)
    history = opened(tmp_path)
    history.keep_verdict("native", KEY, WEIGHTS, 1e-3)
    assert history.verdict(backend, other, WEIGHTS) is None
    history.keep_verdict(backend, other, WEIGHTS, 2e-3)
    later = opened(tmp_path)
    assert (later.verdict("native", KEY, WEIGHTS), later.verdict(backend, other, WEIGHTS)) == (1e-3, 2e-3)


def test_every_field_of_a_shape_counts() -> None:
    changed = {name for change in OTHERS for name in change}
    assert changed == {field.name for field in dataclasses.fields(ShapeKey)}


@pytest.mark.parametrize("part", [part.name for part in dataclasses.fields(Fingerprint)])
def test_another_machine_checks_for_itself(tmp_path: Path, part: str) -> None:
    here = Fingerprint.of()
    store = Store.open(tmp_path, dataclasses.replace(here, **{part: "another"}))
    store.save(VERDICTS, verdict_name("native", KEY, WEIGHTS), 1e-3)
    store.close()
    assert opened(tmp_path).verdict("native", KEY, WEIGHTS) is None


def test_purging_a_resolution_forgets_its_verdicts_and_no_others(tmp_path: Path) -> None:
    wider, tall = dataclasses.replace(KEY, width=640), dataclasses.replace(KEY, height=640)
    history = opened(tmp_path)
    for key in (KEY, wider, tall, dataclasses.replace(KEY, batch=4)):
        for backend in ("native", "cudagraph"):
            history.keep_verdict(backend, key, WEIGHTS, 1e-3)
    history.tune("tile", 64)
    opened(tmp_path)
    history.keep_verdict("native", dataclasses.replace(KEY, batch=6), WEIGHTS, 1e-3)
    history.forget(["512x512", "8x8", "%", "512x51_"])
    for kept in (history, opened(tmp_path)):
        for batch in (2, 4, 6):
            assert kept.verdict("native", dataclasses.replace(KEY, batch=batch), WEIGHTS) is None
        assert kept.verdict("cudagraph", KEY, WEIGHTS) is None
        assert [kept.verdict("native", key, WEIGHTS) for key in (wider, tall)] == [1e-3, 1e-3]
        assert kept.tuned() == {"tile": 64}


def test_purging_a_resolution_forgets_the_verdicts_of_every_machine(tmp_path: Path) -> None:
    other = Store.open(tmp_path, dataclasses.replace(Fingerprint.of(), torch="1.0"))
    other.save(VERDICTS, verdict_name("native", KEY, WEIGHTS), 1e-3)
    other.flush()
    opened(tmp_path).forget(["512x512"])
    assert other.saved(VERDICTS) == {}


def test_a_purge_reaches_what_could_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = Store.open(tmp_path / "file")
    store.save(VERDICTS, verdict_name("native", KEY, WEIGHTS), 1e-3)
    store.save(TUNED, "512x512 is no verdict", 1)
    assert store.trouble
    with pytest.raises(NotKept):
        store.forget(PurgeFilter(["512x512"]))
    assert store.saved(VERDICTS) == {} and store.saved(TUNED) == {"512x512 is no verdict": 1}


def test_purging_everything_forgets_all(tmp_path: Path) -> None:
    history = opened(tmp_path)
    history.keep_verdict("native", KEY, WEIGHTS, 1e-3)
    history.forget()
    assert history.verdict("native", KEY, WEIGHTS) is None and opened(tmp_path).verdict("native", KEY, WEIGHTS) is None


def test_without_a_folder_a_verdict_holds_in_this_process() -> None:
    history = History()
    history.keep_verdict("native", KEY, WEIGHTS, 1e-3)
    assert history.verdict("native", KEY, WEIGHTS) == 1e-3
    history.forget(["512x512"])
    assert history.verdict("native", KEY, WEIGHTS) is None


@pytest.mark.parametrize("error", [math.nan, math.inf, -1.0])
def test_what_is_no_error_is_not_kept(error: float) -> None:
    history = History()
    history.keep_verdict("native", KEY, WEIGHTS, error)
    assert history.verdict("native", KEY, WEIGHTS) is None


@pytest.mark.parametrize("value", [None, True, "1e-3", [1e-3], {"error": 1e-3}, math.nan, math.inf, -1e-3], ids=repr)
def test_a_strange_stored_verdict_is_none(tmp_path: Path, value: Any) -> None:
    store = Store.open(tmp_path)
    store.save(VERDICTS, verdict_name("native", KEY, WEIGHTS), value)
    store.close()
    assert opened(tmp_path).verdict("native", KEY, WEIGHTS) is None


def test_a_purge_finds_a_verdict_by_its_name() -> None:
    name = verdict_name("native", KEY, WEIGHTS)
    for resolutions, model, architectures, goes in (
        (None, None, [], True), (["512x512"], None, [], True), (["512x51"], None, [], False),
        (None, "SD1", ["sd1"], True), (None, "SD1", ["sd"], False), (["512x512"], "SD1", ["sd1"], True),
        (["512x512"], "SD1", [], False), ([], None, [], False),
    ):
        assert PurgeFilter(resolutions, model, architectures).finding(VERDICTS, name) is goes, (resolutions, model)
    assert not PurgeFilter(["512x512"], "SD1", ["sd1"]).finding(VERDICTS, "no such thing")


def test_the_oldest_verdicts_make_room(tmp_path: Path) -> None:
    limit = 96 << 10
    store = Store.open(tmp_path, Fingerprint.of(), size_limit=limit)
    store.save(TUNED, "layout", "nhwc")
    for batch in range(0, 2000, 100):
        for number in range(batch, batch + 100):
            store.save(VERDICTS, verdict_name("native", dataclasses.replace(KEY, batch=number), WEIGHTS), number / 1e6)
        store.record(HistoryRow("sd1", "SD1", f"{batch}x8", 2, 77, "float16"))
        assert store.flush() and store.size_bytes() <= limit
    kept = sorted(store.saved(VERDICTS).values())
    assert 100 < len(kept) < 2000 and kept[-1] == 1999 / 1e6
    assert kept == [number / 1e6 for number in range(2000 - len(kept), 2000)]
    assert store.saved(TUNED) == {"layout": "nhwc"}, "what was tuned is not a verdict"
    store.close()


def test_memory_is_limited_while_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = Store.open(tmp_path / "file")
    for number in range(9000):
        store.save(VERDICTS, f"8x8 {number}", number)
    kept = sorted(store.saved(VERDICTS).values())
    assert 3000 < len(kept) <= 4096 and kept[-1] == 8999
    store.close()


@pytest.mark.usefixtures("host_timed_often")
def test_a_checked_shape_is_not_checked_again_and_the_hosts_speed_is_still_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unet = diffusers_unet()
    call = a_call(unet)
    asked: list[None] = []

    def host() -> torch.Tensor:
        asked.append(None)
        return diffusers_output(unet, call)

    def one_call() -> dict[str, Any]:
        monkeypatch.setattr(runtime, "history", opened(tmp_path))
        runtime.table.forget({entry.key for entry in runtime.table.entries()})  # as a process begins
        runtime.adopt(unet)
        with torch.no_grad():
            # So often that both sides have been timed as a ratio needs it: what is less is not kept.
            for _ in range(6):
                runtime.run(unet, call, host)
        runtime.keep_history()
        return runtime.status()

    first, times_asked = one_call(), len(asked)
    assert first["route"] == "plain" and times_asked and first["host_ms"]
    second = one_call()
    assert second["route"] == "plain" and len(asked) == times_asked
    assert second["relative_error"] == first["relative_error"]
    assert second["host_ms"] == pytest.approx(first["host_ms"])


A_PROCESS = """
import json, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import torch
torch.set_num_threads(1)
import lib_onediff
assert lib_onediff.__file__.startswith(sys.argv[1])
from builders import a_call, ldm_output, ldm_unet, relative_error
from lib_onediff.options.settings import Settings
from lib_onediff.runtime.runtime import runtime
runtime.history.open(Path(sys.argv[3]))
unet = ldm_unet(num_res_blocks=1, channel_mult=[1, 2], attention_resolutions=[2])
runtime.adopt(unet, Settings(backend="eager"))
call = a_call(unet)
with torch.no_grad():
    output = runtime.run(unet, call, lambda: ldm_output(unet, call))
    told = lib_onediff.status()
    error = relative_error(runtime.run(unet, call, lambda: ldm_output(unet, call)), ldm_output(unet, call))
runtime.history._store.close()
print(json.dumps([told["route"], told["reason"], told["relative_error"], error]))
"""


def test_sources_that_an_update_has_broken_are_checked_and_not_used(tmp_path: Path) -> None:
    """With ldm's UNet, which is imported in a moment."""
    pytest.importorskip(LDM_UNET, reason="stable-diffusion-sdkit is not installed")
    package, tests = Path(lib_onediff.__file__).parent, Path(__file__).parent
    ours = tmp_path / "extension"
    shutil.copytree(package, ours / "lib_onediff")

    def in_a_process() -> tuple[str, str, float | None, float]:
        ended = subprocess.run(
            [sys.executable, "-c", A_PROCESS, str(ours), str(tests), str(tmp_path / "cache")], cwd=ours, check=True,
            capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""},
        )
        return tuple(json.loads(ended.stdout.splitlines()[-1]))

    route, reason, known, error = in_a_process()
    assert (route, reason) == ("plain", "") and known < 1e-5 and error < 1e-5
    operators = ours / "lib_onediff" / "ops" / "torch_ops.py"
    right = "functional.gelu(gate)"
    assert right in operators.read_text()
    operators.write_text(operators.read_text().replace(right, "functional.relu(gate) + 1"))
    route, reason, known, error = in_a_process()
    assert route == "host" and "differs from the model's own forward" in reason and error < 1e-5

"""What is remembered between processes: uses, times, verdicts, choices and pins of this machine, until a purge."""
from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import LDM_UNET, a_call, diffusers_output, diffusers_unet, served, shared_unet
from store_builders import FILE, opened, opened_as, row, uses

import lib_onediff
from lib_onediff.core.key import ShapeKey
from lib_onediff.core.table import Entry
from lib_onediff.runtime.runtime import runtime
from lib_onediff.store import history as history_module
from lib_onediff.store.history import VERDICTS, History, verdict_name
from lib_onediff.store.machine import Fingerprint, source_digest
from lib_onediff.store.store import LIMITS

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


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A cache folder in which one image's calls were taken down."""
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
def test_the_next_process_has_the_rows(used: Path) -> None:
    now = {found.resolution: found for found in runtime.rows()}
    assert uses(opened(used)) == {"64x64": 4, "88x72": 1}
    runtime.table.forget({entry.key for entry in runtime.table.entries()})
    remembered = {found.resolution: found for found in runtime.rows()}
    assert {found.state for found in remembered.values()} == {"on disk"}
    assert remembered["64x64"].step_ms == now["64x64"].step_ms > 0
    assert remembered["64x64"].ratio == now["64x64"].ratio > 0 and remembered["64x64"].ratio_range is None
    # One call is not enough to be remembered, for its time.
    assert remembered["88x72"].step_ms is remembered["88x72"].ratio is None
    assert remembered["64x64"].shapes[0].dtype == "float32"


def test_uses_are_counted_once_and_from_one_after_a_purge(used: Path) -> None:
    runtime.keep_history()
    assert uses(runtime.history) == {"64x64": 4, "88x72": 1}
    runtime.purge(["64x64"])
    assert uses(opened(used)) == {"88x72": 1}
    unet = shared_unet("small")
    lib_onediff.compile_unet(unet)
    served(unet, a_call(unet, 8, 8))
    lib_onediff.uncompile_unet(unet)
    runtime.keep_history()
    assert uses(runtime.history) == {"64x64": 1, "88x72": 1}
    runtime.purge()
    assert runtime.rows() == [] and opened(used).rows() == []


def test_without_a_folder_it_holds_in_this_process() -> None:
    history = History()
    history.keep([])
    history.keep_compiled()
    history.keep_verdict("native", KEY, WEIGHTS, 1e-3)
    history.pin("SD1", "512x512", True)
    assert history.verdict("native", KEY, WEIGHTS) == 1e-3 and history.pins() == {("SD1", "512x512")}
    history.forget()
    assert history.verdict("native", KEY, WEIGHTS) is None and history.pins() == {("SD1", "512x512")}
    assert history.rows() == [] and history.trouble is None and history.size_bytes() == 0


# --- machines and versions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [part.name for part in dataclasses.fields(Fingerprint)])
def test_another_machine_or_version_measures_for_itself(tmp_path: Path, part: str) -> None:
    """Times, verdicts and choices are forgotten; what users do and pin is not."""
    before = opened_as(dataclasses.replace(Fingerprint.of(), **{part: "another"}), tmp_path)
    before.record(row(uses=30, step_ms=9.0))
    before.tune("tile", 64)
    before.keep_verdict("native", KEY, WEIGHTS, 1e-3)
    before.pin("SD1", "512x512", True)
    history = opened(tmp_path)
    assert history.rows() == [] and history.tuned() == {} and history.verdict("native", KEY, WEIGHTS) is None
    assert [found.uses for found in history.used()] == [30] and history.pins() == {("SD1", "512x512")}
    history.record(row(uses=4))
    assert [found.uses for found in history.used()] == [34]
    history.forget(["512x512"])
    assert opened(tmp_path).used() == [] == before.rows(), "a purge is of every machine"


def test_what_0_2_0_has_written_is_taken_over(tmp_path: Path) -> None:
    """Its file had the same tables, and one list of pins."""
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


@pytest.mark.parametrize("stored", [None, "512x512", [1, 2], [["SD1"]], {"SD1": "512x512"}, [None], True])
def test_pins_that_anybody_has_written(stored: object) -> None:
    chosen = {"pinned": stored, "pinned 8x8": True, "pinned 8x8 SD1": 1, "pinned 64x64 SD1": True}
    assert history_module.stored_pins(chosen) == {("SD1", "64x64")}


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
    assert Fingerprint.of().onediff == f"{lib_onediff.__version__} {source_digest()}"


@pytest.mark.gpu
def test_the_fingerprint_of_a_gpu() -> None:
    gpu = Fingerprint.of()
    assert gpu.gpu == torch.cuda.get_device_name()
    assert gpu.driver[:1].isdigit() and "." in gpu.driver


# --- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "change"), [("cudagraph", {}), *(("native", change) for change in OTHERS)])
def test_another_shape_or_backend_is_another_verdict(tmp_path: Path, backend: str, change: dict[str, Any]) -> None:
    other = dataclasses.replace(KEY, **change)
    history = opened(tmp_path)
    history.keep_verdict("native", KEY, WEIGHTS, 1e-3)
    assert history.verdict(backend, other, WEIGHTS) is None
    history.keep_verdict(backend, other, WEIGHTS, 2e-3)
    later = opened(tmp_path)
    for known in (history, later, later):
        assert (known.verdict("native", KEY, WEIGHTS), known.verdict(backend, other, WEIGHTS)) == (1e-3, 2e-3)


def test_every_field_of_a_shape_counts() -> None:
    changed = {name for change in OTHERS for name in change}
    assert changed == {field.name for field in dataclasses.fields(ShapeKey)}


@pytest.mark.parametrize("value", [None, True, "1e-3", [1e-3], math.nan, math.inf, -1e-3], ids=repr)
def test_what_is_no_error_is_no_verdict(tmp_path: Path, value: Any) -> None:
    history = opened(tmp_path)
    if isinstance(value, float):
        history.keep_verdict("native", KEY, WEIGHTS, value)
        assert history.verdict("native", KEY, WEIGHTS) is None
    history._save(VERDICTS, verdict_name("native", KEY, WEIGHTS), value)
    assert opened(tmp_path).verdict("native", KEY, WEIGHTS) is None


def test_the_verdicts_that_were_not_used_for_longest_make_room(tmp_path: Path) -> None:
    """As many LoRAs leave them: one for each."""
    [most] = [most for _, _, which, most in LIMITS if VERDICTS in which]
    history = opened(tmp_path)
    history.tune("layout", "nhwc")
    for number in range(most):
        history.keep_verdict("native", KEY, f"LoRA {number}", 1e-3)
    later = opened(tmp_path)
    assert later.verdict("native", KEY, "LoRA 0") == 1e-3
    for number in range(most, most + 10):
        later.keep_verdict("native", KEY, f"LoRA {number}", 1e-3)
    last = opened(tmp_path)
    known = [number for number in range(most + 10) if last.verdict("native", KEY, f"LoRA {number}")]
    assert known == [0, *range(11, most + 10)]
    assert last.tuned() == {"layout": "nhwc"}, "what was tuned is no verdict"


def test_a_purge_takes_the_resolutions_of_a_model_and_no_others(tmp_path: Path) -> None:
    """Of everything: history, verdicts, written or not, and in the next process."""
    history = opened(tmp_path)
    keys = {(model, width): dataclasses.replace(KEY, architecture=f"of-{model}", width=width)
            for model in ("SD1", "SDXL") for width in (64, 72)}
    for (model, _), key in keys.items():
        history.keep([Entry(key, model, uses=3)])
        history.keep_verdict("native", key, WEIGHTS, 1e-3)
    history.tune("tile", 64)
    history.commit()
    history.keep_verdict("cudagraph", keys["SD1", 64], WEIGHTS, 1e-3)
    left = set(keys)
    for resolutions, model, gone in (
        (["8x8", "%", "512x51_"], None, set()), (["512x512"], "SD1", {("SD1", 64)}),
        (["576x512"], None, {("SD1", 72), ("SDXL", 72)}), (None, "SDXL", {("SDXL", 64)}),
    ):
        history.forget(resolutions, model=model)
        left -= gone
        for known in (history, opened(tmp_path)):
            assert {name for name in keys if known.verdict("native", keys[name], WEIGHTS)} == left
            assert {(found.model, int(found.resolution[:3]) // 8) for found in known.rows()} == left
            assert (known.verdict("cudagraph", keys["SD1", 64], WEIGHTS) == 1e-3) == (("SD1", 64) in left)
            assert known.tuned() == {"tile": 64}
    history.keep([Entry(keys["SDXL", 64], "SDXL", uses=3)])
    assert [found.uses for found in history.rows()] == [3], "its uses count from the first again"


def test_a_purge_of_a_model_takes_verdicts_of_its_architectures(tmp_path: Path) -> None:
    """Also where no image has made a row of it."""
    history = opened(tmp_path)
    history.keep_verdict("native", KEY, WEIGHTS, 1e-3)
    history.forget(model="SD1")
    assert history.verdict("native", KEY, WEIGHTS) == 1e-3
    history.forget(model="SD1", architectures=["sd1"])
    assert history.verdict("native", KEY, WEIGHTS) is opened(tmp_path).verdict("native", KEY, WEIGHTS) is None


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


# --- what Triton compiles ---------------------------------------------------------------------------------------------


@pytest.fixture
def triton_variable(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    return "TRITON_CACHE_DIR"


def test_triton_keeps_its_files_in_the_cache_folder(tmp_path: Path, triton_variable: str) -> None:
    folder = tmp_path / "cache"
    history = opened(folder)
    history.keep_compiled()
    assert os.environ[triton_variable] == str(folder / "compiled" / "triton")
    before = history.size_bytes()
    for name, age in (("OLD", 1000), ("BEING-WRITTEN", 0)):
        kernel = folder / "compiled" / "triton" / name / "kernel.cubin"
        kernel.parent.mkdir(parents=True)
        kernel.write_bytes(bytes(1000))
        os.utime(kernel.parent, (kernel.stat().st_mtime - age,) * 2)
    assert history.size_bytes() >= before + 2000
    history.forget(["512x512"])
    assert len(list(folder.rglob("kernel.cubin"))) == 2, "a resolution's purge compiles nothing anew"
    history.forget()
    assert [kernel.parent.name for kernel in folder.rglob("kernel.cubin")] == ["BEING-WRITTEN"]


@pytest.mark.skipif(os.name != "posix", reason="on Windows a folder's mode tells nothing")
@pytest.mark.parametrize("which", ["cache/compiled", "cache", "."])
def test_where_others_can_write_triton_keeps_them_at_home(tmp_path: Path, which: str, triton_variable: str) -> None:
    """They are run as they lie."""
    (tmp_path / "cache" / "compiled").mkdir(parents=True)
    (tmp_path / which).chmod(0o777)
    opened(tmp_path / "cache").keep_compiled()
    assert os.environ[triton_variable] == "/elsewhere"
    # In a folder such as /tmp nobody can rename what is not theirs.
    (tmp_path / which).chmod(0o1777)
    opened(tmp_path / "cache").keep_compiled()
    assert (os.environ[triton_variable] == "/elsewhere") == (which == "cache/compiled")


@pytest.mark.skipif(os.name != "posix", reason="to make a link takes rights on Windows")
@pytest.mark.parametrize("which", ["compiled", "compiled/triton", "compiled/triton/KEY"])
def test_what_a_link_leads_to_is_not_purged(tmp_path: Path, which: str, triton_variable: str) -> None:
    kernel = tmp_path / "theirs" / "triton" / "KEY" / "kernel"
    kernel.parent.mkdir(parents=True)
    kernel.touch()
    os.utime(kernel.parent, (1, 1))
    link = tmp_path / "cache" / which
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "theirs" / which.removeprefix("compiled").strip("/"), target_is_directory=True)
    history = opened(tmp_path / "cache")
    history.keep_compiled()
    assert which != "compiled" or os.environ[triton_variable] == "/elsewhere"
    history.forget()
    assert kernel.exists()

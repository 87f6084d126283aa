"""The benchmark's sections beside the side-by-side table: fresh processes, new sizes, whole images."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")

from deepcache_builders import equal_distances, few_steps_suffice  # noqa: F401
from grid import WHOLE, first

from lib_onediff.bench import __main__ as bench
from lib_onediff.bench import children, cold, first_calls, images, report
from lib_onediff.bench.children import Task, ask
from lib_onediff.bench.clock import count_compilations, hook_place
from lib_onediff.bench.image_settings import TIMED
from lib_onediff.bench.options import parse
from lib_onediff.bench.variants import BASELINE

CPU = torch.device("cpu")
EAGER = "onediff eager"
ROOT = Path(__file__).parents[2]
# Two more processes.
COLD = ("--cold",) if WHOLE else ()


def task(job: str, variant: str = EAGER, **more: object) -> Task:
    options = parse(["--dtype", "fp32"])
    return Task.of(job, "tiny-sd15", variant, [(64, 64), (64, 72)], options, **more)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """One run of the command with all sections that fit into a few seconds."""
    folder = tmp_path_factory.mktemp("bench")
    target = folder / "bench.json"
    command = [
        sys.executable, "-m", "lib_onediff.bench", "--models", "tiny-sd15", "--sizes", "64x64", "--runs", "1",
        "--variants", EAGER, "--dtype", "fp32", "--images", "--steps", "2", "--settings", "onediff", "--json",
        str(target), *COLD,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment), target


def test_the_command_prints_every_table(finished: tuple) -> None:
    run, _ = finished
    assert run.returncode == 0, run.stderr
    assert torch.__version__ in run.stdout and "failed" not in run.stdout
    lines = ["| tiny-sd15 | 64x64 | onediff eager |", "| tiny-sd15 | 64x64 | onediff |"]
    for line in lines + ["| tiny-sd15 | onediff eager |"] * len(COLD):
        assert line in run.stdout, line


def test_the_file_carries_every_section(finished: tuple) -> None:
    document = json.loads(finished[1].read_text())
    assert document["machine"]["torch"] == torch.__version__
    assert [row["variant"] for row in document["rows"]] == [EAGER]
    assert len(document["cold"]) == len(COLD)
    for start in document["cold"]:
        assert 0 < start["first_s"] < start["ready_s"] and 0 < start["next_first_s"] < start["next_ready_s"]
        assert start["calls"] == 2 and not start["problem"]
    host, ours, *_ = document["images"]
    assert host["ratio"] == 1.0 and ours["seconds"] > 0 and ours["mean_difference"] < 1e-5
    assert document["new_sizes"] == []


def test_a_task_survives_its_way_to_another_process() -> None:
    asked = task("cold", verify=True, cache_folder="somewhere")
    assert Task.from_text(json.dumps(vars(asked))) == asked


def test_why_another_process_failed_is_one_line() -> None:
    assert ask(task("no such job")) == {"problem": "KeyError: 'no such job'"}


def test_a_process_says_what_it_cannot_measure(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    asked = json.dumps(vars(task("cold", "host eager + CUDA graph")))
    assert bench.work_for_parent(asked, CPU) == 0
    assert json.loads(capsys.readouterr().out) == {"problem": "CUDA graphs need a GPU"}


def test_a_process_that_dies_is_a_failure_with_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children.sys, "executable", "false")
    assert ask(task("cold")) == {"problem": "the process ended with 1"}


@pytest.mark.parametrize("variant", [BASELINE, EAGER])
def test_a_start_takes_longer_to_full_speed_than_to_its_first_output(variant: str, tmp_path: Path) -> None:
    with torch.no_grad():
        result = cold.child(task("cold", variant, cache_folder=str(tmp_path)), CPU)
    assert 0 < result["first_s"] < result["ready_s"] and result["calls"] == 2


def test_a_failed_start_says_why_in_the_table() -> None:
    failed = cold.Start("sdxl", "onediff native", problem="no")
    done = cold.Start("sdxl", BASELINE, 1.0, 2.0, 0.5, 0.75, 2)
    lines = report.markdown(cold.HEADINGS, [failed.cells(), done.cells()]).splitlines()
    assert lines[2] == "| sdxl | onediff native | failed: no |  |  |  |  |"
    assert lines[3] == "| sdxl | host eager | 1.00 | 2.00 | 0.50 | 0.75 | 2 |"


def test_host_and_ours_take_turns_at_every_new_size() -> None:
    with torch.no_grad():
        result = first_calls.child(task("first calls"), CPU)
    assert len(result["sizes"]) == 3, "the size at which it warms up, and two"
    order = [list(at_size) for at_size in result["sizes"]]
    assert [names[:2] for names in order] == [["host_s", "own_s"], ["own_s", "host_s"], ["host_s", "own_s"]]


def test_every_new_size_has_a_row_with_and_without_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(asked: Task) -> dict:
        """What another process would do, but in this one."""
        with torch.no_grad():
            return json.loads(json.dumps(first_calls.child(Task.from_text(json.dumps(vars(asked))), CPU)))

    monkeypatch.setattr(first_calls, "ask", here)
    options = parse(["--dtype", "fp32", "--variants", EAGER, "--new-sizes", "64x72", "72x64"])
    rows = first_calls.first_calls("tiny-sd15", options)
    assert [row.size for row in rows] == ["64x64 (first of all)", "64x72", "72x64"]
    for row in rows:
        assert row.host_s > 0 and row.own_s > 0 and row.checked_s > 0 and not row.problem and row.variant == EAGER


def test_with_the_check_the_host_has_not_called_at_that_size_before() -> None:
    with torch.no_grad():
        result = first_calls.child(task("first calls", verify=True), CPU)
    assert all("host_s" not in at_size and at_size["own_s"] > 0 for at_size in result["sizes"])


def test_how_much_longer_a_first_call_takes_is_in_the_table() -> None:
    row = first_calls.NewSize("sdxl", "960x720", "onediff native", 0.2, 0.25, 0.47, 0)
    assert row.cells() == ["sdxl", "960x720", "0.200", "onediff native", "0.250", "+0.050", "0.470", "0"]
    row.compilations = None
    assert row.cells()[-1] == "unknown"


def test_kernels_are_counted_where_triton_tells() -> None:
    triton = pytest.importorskip("triton")
    owner, name = hook_place()
    heard: list[str] = []
    setattr(owner, name, lambda **given: heard.append(given["key"]))
    try:
        before = getattr(owner, name)
        with count_compilations() as built:
            assert built.count == 0
            for key in ("one", "two"):
                getattr(owner, name)(key=key)
        assert built.count == 2 and heard == ["one", "two"], f"the hook of Triton {triton.__version__} goes on"
        assert getattr(owner, name) is before
    finally:
        setattr(owner, name, None)


def test_without_triton_the_count_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with count_compilations() as built:
        pass
    assert built.count is None


def test_a_section_that_fails_is_one_line_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fails(*arguments: object) -> None:
        raise RuntimeError("CUDA out of memory\nand a long story")

    monkeypatch.setattr(bench, "measure", fails)
    target = tmp_path / "bench.json"
    monkeypatch.setattr(sys, "argv", [
        "bench", "--models", "tiny-sd15", "--sizes", "64x64", "--runs", "1", "--dtype", "fp32", "--images",
        "--steps", "2", "--settings", "onediff", "--json", str(target),
    ])
    assert bench.main() == 1
    printed = capsys.readouterr().out
    assert "tiny-sd15, UNet calls: CUDA out of memory\n" in printed and "long story" not in printed
    document = json.loads(target.read_text())
    assert document["rows"] == [] and document["images"]


@pytest.mark.parametrize("model", first(1, ["tiny-sdxl", "tiny-sd15"]))
def test_every_pipeline_draws_the_hosts_image(model: str) -> None:
    options = parse(["--images", "--sizes", "64x64", "--steps", "4", "--runs", "1", "--dtype", "fp32"])
    host, *ours = images.images(model, options, torch.device("cpu"))
    assert host.pipeline == images.HOST and [row.pipeline for row in ours] == list(TIMED)
    for row in ours:
        assert row.route == "plain" and row.seconds > 0 and len(row.cells()) == len(images.HEADINGS)
        lossy = "DeepCache" in row.pipeline
        assert (1e-5 if lossy else 0) <= row.mean_difference < (0.2 if lossy else 1e-5), row


@pytest.mark.parametrize("model", ["tiny-sdxl", "tiny-sd15"])
def test_several_images_at_once_with_text_encoders(model: str) -> None:
    options = parse(["--images", "--steps", "1", "--dtype", "fp32"])
    one, two = (images.Images(model, options, torch.device("cpu"), *more) for more in ((), (2, True)))
    drawn = two.draw((64, 64))
    # Its noise is drawn for both of them in one go, and the first is the one that is drawn alone.
    assert drawn.shape[0] == 2 and (drawn[:1] - one.draw((64, 64))).abs().max() < 1e-3
    times, _ = two.timed((64, 64), 1)
    assert len(times) == 1 and times[0] > 0

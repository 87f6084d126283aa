"""The benchmark measures what it reports. No test depends on the value of a time."""
from __future__ import annotations

import json
import re
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

pytest.importorskip("diffusers")

from samplings import few_steps_suffice  # noqa: F401
from two_cpus import TwoCpus

from lib_onediff.bench import __main__ as bench
from lib_onediff.bench import images, models, sheet
from lib_onediff.bench.__main__ import parse
from lib_onediff.bench.steps import Row
from lib_onediff.core.quality import compare
from lib_onediff.core.sizes import Size
from lib_onediff.runtime.runtime import runtime

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
# The tops of the rows of a sheet with two.
ROW_TOPS = 0, sheet.SIDE + sheet.GAP
SMALL = "--model tiny-sd15 --size 64x64 --runs 1 --backend host eager --dtype "


def documented_commands() -> list[str]:
    """The arguments of the benchmark's commands in the documentation and in its own help."""
    pages = [ROOT / "README.md", *sorted((ROOT / ".readme").glob("*.md"))]
    text = bench.EPILOG + "".join(page.read_text(encoding="utf-8") for page in pages)
    # A command inside of a sentence ends at its backtick.
    found = re.findall(r"-m lib_onediff\.bench ([^`\n]*)", text)
    return [words for words in found if "--help" not in words and "|" not in words]


@pytest.mark.parametrize("words", sorted(set(documented_commands())))
def test_the_commands_in_the_documentation_are_valid(words: str) -> None:
    options = parse(shlex.split(words))
    assert options.command in words and len(options.set) == words.count("--set")


@pytest.mark.parametrize(("words", "sentence"), [
    ("step --share", "--share"), ("webui http://here --share . --set low_bit=int8", "--share"),
    ("webui http://here --share no/such", "--share"), ("step --size 1024", "'1024' is not a size"),
    ("step --size 100x512", "100x512: the width must be a multiple of 8"), ("step --size '512x512 x2'", "--size takes"),
])
def test_a_wrong_argument_ends_the_command_with_one_sentence(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """words: the command's arguments. sentence: the beginning of the message, which is the last line."""
    with pytest.raises(SystemExit):
        parse(shlex.split(words))
    assert f"error: {sentence}" in capsys.readouterr().err.splitlines()[-1]


def run(words: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[int, list[Row]]:
    """The exit code of a command, and its rows."""
    target = folder / "bench.json"
    monkeypatch.setattr(sys, "argv", ["bench", *shlex.split(words), "--json", str(target)])
    status = bench.main()
    return status, json.loads(target.read_text(encoding="utf-8"))["rows"] if target.exists() else []


def test_the_step_command_reports_times_speedups_and_errors_against_float32(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three variants of a bfloat16 step: the host's, ours, and ours on two simulated GPUs (TwoCpus). x_host: the
    speedup over the host. error_x_host: the error in multiples of the host's."""
    monkeypatch.setattr(runtime.two_gpus, "cards", TwoCpus())
    status, rows = run(f"step {SMALL} bf16 --batch 2 --set second_gpu=auto", monkeypatch, tmp_path)
    host, eager, two = rows
    assert status == 0 and [row["backend"] for row in rows] == ["host", "eager", "second_gpu=auto"]
    assert host["x_host"] == host["error_x_host"] == 1 and "served_by" not in host
    for row in (eager, two):
        assert 1e-4 < row["relative_error"] < 5e-2 and row["x_host"] == pytest.approx(host["ms"] / row["ms"])
        assert row["first_call_s"] > row["ms"] / 1e3
    assert eager["served_by"] == "eager plain" and "cpu + cpu:1, 1+1 rows" in two["served_by"]
    assert "| tiny-sd15 | 64x64 | 2 | eager |" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_unsupported_variants_get_a_note_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """host+graph needs a GPU, which this machine lacks: its row has a note instead of a time, and the exit code is
    1."""
    status, rows = run(f"step {SMALL.replace('eager', 'host+graph')} fp32", monkeypatch, tmp_path)
    notes = {row["backend"]: row.get("note") for row in rows}
    assert status == 1 and notes == {"host+graph": "CUDA graphs need an NVIDIA GPU", "host": None}


@pytest.mark.parametrize("content", [None, b"not a checkpoint"])
def test_a_model_file_that_cannot_be_loaded_raises_an_error_that_names_it(
    tmp_path: Path, content: bytes | None
) -> None:
    """content: the content of the file; None: the file does not exist."""
    path = tmp_path / "model.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors could not be loaded as a UNet: ."):
        models.unet_named(str(path), CPU)


def test_images_of_each_variant_are_compared_with_those_of_diffusers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without DeepCache, the images differ by rounding (a relative error below 1e-4); with DeepCache by more."""
    words = "image --model tiny-sdxl --size 64x64 --steps 4 --runs 1 --dtype fp32 --set deepcache_interval=3"
    status, (host, exact, lossy) = run(words, monkeypatch, tmp_path)
    assert status == 0 and host["options"] == "host" and lossy["options"] == "deepcache_interval=3"
    assert exact["relative_error"] < 1e-4 < lossy["relative_error"] < 0.5 and exact["x_host"] > 0


def test_the_quality_command_ranks_exact_images_before_lossy_ones_and_these_before_another_seed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each row compares an image with the host's: that image itself, another seed, exact settings, DeepCache. The last
    lines read the contact sheet (--picture), whose two rows of images must be similar but not equal."""
    monkeypatch.setattr(images, "SIDE", 64)
    picture = tmp_path / "sheet.png"
    words = f"quality --images 2 --steps 4 --dtype fp32 --set deepcache_interval=3 --picture {picture}"
    status, (true, another, exact, lossy) = run(words, monkeypatch, tmp_path)
    assert status == 0 and true["distance"] == 0 and true["ssim"] == 1
    for name in ("distance", "relative_error"):
        assert exact[name] < 1e-2 and exact[name] < lossy[name] < another[name]
    assert exact["psnr_lowest_5"] > 48 and exact["ssim"] > 0.999 and 0 <= exact["recognised"] <= 1
    with Image.open(picture) as drawn:
        above, below = (drawn.crop((sheet.LABEL_WIDTH, top, drawn.width, top + sheet.SIDE)) for top in ROW_TOPS)
    assert 20 < compare(above, below).psnr < 60


class WebUI:
    """A WebUI whose image of n steps takes one second plus n times the time of a step plus noise. step_s: seconds of a
    step with OneDiff (True) and without. noise: seconds, added to the images in turn."""

    def __init__(self, step_s: dict[bool, float], noise: list[float]) -> None:
        self._step_s = step_s
        self._noise = noise
        self._asked = 0

    def ask(self, path: str) -> dict[str, Any]:
        return {"model": "SD1"}

    def draw(self, size: Size, count: int, arguments: list[Row]) -> tuple[float, str, Counter[str]]:
        self._asked += 1
        noise = self._noise[self._asked % len(self._noise)]
        (options,) = arguments
        return 1 + count * self._step_s[options["enabled"]] + noise, "", Counter(graph=1)


@pytest.mark.parametrize(("noise", "step_ms"), [
    ([0.0, 0.01, -0.01], 50), ([*[0.0] * 7, 5.0], None),
])
def test_the_time_of_a_webui_step_is_reported_only_if_it_can_be_measured(
    noise: list[float], step_ms: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of a step is computed from the difference between images with few and many steps. With an outlier of
    five seconds among the images the difference is not credible, and step_ms is None."""
    monkeypatch.setattr(images, "WebUI", lambda url: WebUI({False: 0.1, True: 0.05}, noise))
    off, on = images.webui(parse(["webui", "http://here", "--steps", "20"]), CPU)
    assert on["options"] == "on" and on["served_by"] == "10 graph" and off["x_off"] == 1
    assert on["step_ms"] == (None if step_ms is None else pytest.approx(step_ms, abs=2))

"""The command that benchmarks a running WebUI, called as the documentation says. The times that it prints are not
checked, except that they are there."""
from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from webui_client import WebUI

from lib_onediff.bench.__main__ import main
from lib_onediff.bench.images import PROMPT

ROOT = Path(__file__).parents[2]
Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    """A function that runs the command with arguments, and returns its exit status, stdout and stderr. The command runs
    in this process, because a new one would spend its time on imports."""
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["bench", "webui", *arguments])
        return main(), *capsys.readouterr()
    return run


def test_the_benchmark_times_images_without_onediff_with_it_and_with_options(webui: WebUI) -> None:
    """The output has a row for each of the three, and the host and OneDiff have made the expected numbers of UNet
    calls."""
    before = webui.calls()
    options = "--size 64x64 --steps 2 --runs 1 --set vae_precision=fp32"
    command = [sys.executable, "-m", "lib_onediff.bench", "webui", webui.url, *options.split()]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    after = webui.calls()
    # An image of 2 steps first, one of 4 that is not counted, then of 2 and of 4.
    assert after["host"] - before["host"] == 12
    assert sum(after[route] - before[route] for route in ("graph", "plain")) == 24
    rows = [line for line in finished.stdout.splitlines() if "64x64" in line]
    assert [name in row for name, row in zip(("off", "on", "vae_precision=fp32"), rows, strict=True)] == [True] * 3


def test_the_files_that_a_user_shares_have_the_measured_values_and_nothing_personal(
    webui: WebUI, bench: Bench, tmp_path: Path
) -> None:
    """--share writes a JSON file and a line of Markdown. The PSNR in them equals that of the same images made again
    here. No address, prompt, folder or checkpoint's name is in them."""
    status, out, err = bench(webui.url, *f"--size 64x64 --steps 12 --runs 1 --share {tmp_path}".split())
    assert status == 0, out + err
    written = {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()}
    assert sorted(written) == ["onediff-card.json", "onediff-card.md"]
    card = json.loads(written["onediff-card.json"])
    reported = webui.status()
    off, exact, *lossy = card["rows"]
    assert {name: card[name] for name in reported["machine"]} == reported["machine"]
    assert [row["options"] for row in card["rows"]] == ["off", *reported["presets"]]
    assert off["served_by"] == "12 host" and "12 plain" in exact["served_by"] and "psnr_db" not in off

    def image(*arguments: object) -> numpy.ndarray:
        script = {"OneDiff": {"args": list(arguments)}}
        request = {"prompt": PROMPT, "seed": 1, "steps": 12, "sampler_name": "Euler", "alwayson_scripts": script}
        return webui.txt2img(**request).pixels.astype(float)

    images = {row["options"]: image(True, row["options"]) for row in (exact, *lossy)}
    for row, other in ((exact, image(False)), *((row, images["Exact"]) for row in lossy)):
        error = numpy.square(images[row["options"]] - other).mean()
        assert row["psnr_db"] == (pytest.approx(10 * math.log10(255**2 / error), abs=0.01) if error else None)
    assert all(row["psnr_db"] for row in lossy)
    (line,) = written["onediff-card.md"].splitlines()
    heads, _, printed = out.splitlines()[:3]
    assert printed == line and heads.count("|") == line.count("|")
    assert f" 64x64, 12 steps | {off['image_s']:.2f} s | " in line
    assert f"({exact['x_off']:.2f}x, " in line and f" {lossy[0]['psnr_db']:.1f} dB, SSIM {lossy[0]['ssim']:.3f}" in line
    for text in written.values():
        # The checkpoint is named by its kind alone.
        for secret in (webui.url, "127.0.0.1", PROMPT, "random-tiny", str(tmp_path), str(Path.home()), str(ROOT)):
            assert secret not in text


def test_the_benchmark_fails_with_a_sentence_if_onediff_is_off_or_no_webui_answers(
    webui: WebUI, bench: Bench, tmp_path: Path
) -> None:
    """The cases: OneDiff is switched off; a server answers that is no WebUI; no server answers. The exit status is 1,
    stderr ends with the sentence, and nothing is written to the folder of --share."""
    with webui.options(onediff_enabled=False):
        off = bench(webui.url, "--size", "64x64", "--share", str(tmp_path))
    others = bench(f"{webui.url}/no/such", "--share", str(tmp_path)), bench("http://127.0.0.1:9", "--runs", "1")
    sentences = "does not serve this WebUI: OneDiff is switched off", "404", "OneDiff bench: http://127.0.0.1:9/"
    for (status, out, err), sentence in zip((off, *others), sentences, strict=True):
        assert status == 1 and not out and sentence in err.splitlines()[-1]
    assert not list(tmp_path.iterdir())

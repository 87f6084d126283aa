"""The benchmark of a running WebUI, as the documentation gives it. Times are only asked to be times."""
from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from webui_client import WebUI

from lib_onediff.bench.images import PROMPT

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lib_onediff.bench", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_images_are_timed_off_and_on_and_with_options(webui: WebUI) -> None:
    before = webui.calls()
    options = "--size 64x64 --steps 2 --runs 1 --set vae_precision=fp32"
    finished = bench("webui", webui.url, *options.split())
    assert finished.returncode == 0, finished.stdout + finished.stderr
    after = webui.calls()
    # An image of 2 steps first, one of 4 that is not counted, then of 2 and of 4.
    assert after["host"] - before["host"] == 12
    assert sum(after[route] - before[route] for route in ("graph", "plain")) == 24
    rows = [line for line in finished.stdout.splitlines() if "64x64" in line]
    assert [name in row for name, row in zip(("off", "on", "vae_precision=fp32"), rows, strict=True)] == [True] * 3


def test_a_webui_that_is_not_there_is_a_sentence() -> None:
    finished = bench("webui", "http://127.0.0.1:9", "--runs", "1")
    assert finished.returncode == 1 and not finished.stdout
    # torch may have warned before.
    assert finished.stderr.splitlines()[-1].startswith("OneDiff bench: http://127.0.0.1:9/")


def test_a_cards_line_has_what_was_measured_and_tells_nothing_of_the_user(webui: WebUI, tmp_path: Path) -> None:
    options = f"--size 64x64 --steps 12 --runs 1 --share {tmp_path}"
    finished = bench("webui", webui.url, *options.split())
    assert finished.returncode == 0, finished.stdout + finished.stderr
    written = {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()}
    assert sorted(written) == ["onediff-card.json", "onediff-card.md"]
    card, status = json.loads(written["onediff-card.json"]), webui.status()
    off, exact, *lossy = card["rows"]
    assert {name: card[name] for name in status["machine"]} == status["machine"]
    assert [row["options"] for row in card["rows"]] == ["off", *status["presets"]]
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
    heads, _, printed = finished.stdout.splitlines()[:3]
    assert printed == line and heads.count("|") == line.count("|")
    assert f" 64x64, 12 steps | {off['image_s']:.2f} s | " in line
    assert f"({exact['x_off']:.2f}x, " in line and f" {lossy[0]['psnr_db']:.1f} dB, SSIM {lossy[0]['ssim']:.3f}" in line
    for text in written.values():
        # The checkpoint is told by its kind alone.
        for secret in (webui.url, "127.0.0.1", PROMPT, "random-tiny", str(tmp_path), str(Path.home()), str(ROOT)):
            assert secret not in text


def test_without_onediff_no_card_is_written(webui: WebUI, tmp_path: Path) -> None:
    with webui.options(onediff_enabled=False):
        off = bench("webui", webui.url, "--size", "64x64", "--share", str(tmp_path))
    missing = bench("webui", f"{webui.url}/no/such", "--share", str(tmp_path))
    for finished, sentence in ((off, "does not serve this WebUI: OneDiff is switched off"), (missing, "404")):
        assert finished.returncode == 1 and not finished.stdout and sentence in finished.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())

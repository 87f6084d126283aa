"""The benchmark of a running WebUI, as the documentation gives it. Times are only asked to be times."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from webui_client import WebUI

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

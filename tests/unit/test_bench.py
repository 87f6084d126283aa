"""The benchmark measures what it says. No test here looks at a time beyond asking that it is one."""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")

from lib_onediff.bench import models
from lib_onediff.bench.__main__ import size_of
from lib_onediff.bench.measure import Plan, measure
from lib_onediff.bench.variants import BASELINE

CPU = torch.device("cpu")


@pytest.mark.parametrize("wrong", ["1024", "axb", "100x100", "0x512", "1024x", "-8x8"])
def test_a_wrong_size_is_refused_with_a_sentence(wrong: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="multiples of 8"):
        size_of(wrong)


def test_rows_hold_times_ratios_and_the_error_against_float32() -> None:
    plan = Plan("tiny-sdxl", [(64, 64), (72, 88)], [BASELINE, "onediff eager"], 2, 77, torch.bfloat16, 5)
    unet = models.random_unet("tiny-sdxl", CPU)
    rows = measure(unet, plan)
    assert [(row.size, row.variant) for row in rows] == [
        ("64x64", BASELINE), ("64x64", "onediff eager"), ("72x88", BASELINE), ("72x88", "onediff eager")
    ]
    for row in rows:
        assert not row.problem and len(row.times_ms) == 5 and row.first_call_s
        assert row.relative_error and 1e-4 < row.relative_error < 5e-2
        assert row.fastest_ms and row.median_ms and row.fastest_ms <= row.median_ms
    for host, ours in zip(rows[::2], rows[1::2], strict=True):
        assert host.ratio == 1.0
        assert ours.ratio == pytest.approx(host.median_ms / ours.median_ms)
    assert "forward" not in unet.__dict__, "the UNet is given back"


def test_a_variant_that_the_machine_lacks_is_a_sentence_in_its_row() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    plan = Plan("tiny-sd15", [(64, 64)], [BASELINE, "host eager + CUDA graph"], 1, 77, torch.float32, 5)
    rows = measure(models.random_unet("tiny-sd15", CPU), plan)
    assert rows[1].problem == "CUDA graphs need a GPU" and rows[1].median_ms is None


def test_the_command_prints_a_table_and_writes_json_and_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    finished = subprocess.run(
        [sys.executable, "-m", "lib_onediff.bench", "--models", "tiny-sd15", "--sizes", "64x64", "--runs", "5",
         "--variants", BASELINE, "onediff eager", "--dtype", "fp32", "--cold", "--json", str(target),
         "--plot", str(plot)],
        capture_output=True, text=True, cwd=Path(__file__).parents[2], env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert finished.returncode == 0, finished.stderr
    assert "| tiny-sd15 | 64x64 | onediff eager |" in finished.stdout and torch.__version__ in finished.stdout
    document = json.loads(target.read_text())
    assert len(document["rows"]) == 2 and document["cold_start_s"]["tiny-sd15"]["onediff eager"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("content", [None, b"not a checkpoint"])
def test_a_model_that_cannot_be_loaded_is_a_sentence(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "model.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors could not be loaded as a UNet: ."):
        models.load_unet(path, CPU)

"""`bench --quality` with the model and the judge that ship."""
from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from deepcache_builders import few_steps_suffice  # noqa: F401
from PIL import Image

from lib_onediff.bench import __main__ as bench
from lib_onediff.bench import quality
from lib_onediff.bench.captions import held_out_captions
from lib_onediff.demo import SHIPPED
from lib_onediff.quality.judge import load_judge


def test_captions_name_what_the_judge_knows() -> None:
    captions, judge = held_out_captions(), load_judge(quality.JUDGE)
    assert len({caption.prompt for caption in captions}) == 150
    assert {name for caption in captions for name in caption.names} <= set(judge.names)
    assert {caption.background for caption in captions} <= set(judge.backgrounds)


def test_bench_quality_compares_every_setting_with_the_host_and_writes_a_sheet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet, written = tmp_path / "sheet_of_settings.png", tmp_path / "bench.json"
    monkeypatch.setattr(quality, "SIDE", 64)
    monkeypatch.setattr("sys.argv", [
        "bench", "--quality", "3", "--steps", "4", "--dtype", "fp32", "--settings", "onediff",
        "onediff + DeepCache 3, depth 1", "--sheet", str(sheet), "--json", str(written),
    ])
    assert bench.main() == 0
    true, another, host, exact, deepcache = json.loads(written.read_text(encoding="utf-8"))["quality"]
    assert another["setting"] == quality.ANOTHER and another["distance"] > 0 and sum(another["verdicts"].values()) == 3
    assert true["setting"] == "host, float32" and host["psnr"] == math.inf and host["distance"] == 0
    assert exact["psnr_low"] > 48 and exact["ssim"] > 0.999 and exact["distance"] < 1e-3 and not exact["paler"]
    assert deepcache["psnr"] < exact["psnr"] and deepcache["distance"] > exact["distance"]
    assert host["verdicts"] == {"identical": 3} and set(exact["verdicts"]) <= {"identical", "unseen"}
    assert {row["images"] for row in (true, another, host, exact, deepcache)} == {3}
    assert "| onediff + DeepCache 3, depth 1 | " in capsys.readouterr().out
    with Image.open(sheet) as image:
        assert image.width > 3 * 128 and image.height > 3 * 128


def test_every_dtype_begins_with_the_same_noise() -> None:
    whole, half = (quality.load(SHIPPED, dtype, torch.device("cpu")) for dtype in (torch.float32, torch.float16))
    noise = quality.first_latents(whole, [3, 4])
    assert noise.shape == (2, 4, quality.SIDE // 8, quality.SIDE // 8) and not torch.equal(noise[0], noise[1])
    assert torch.equal(quality.first_latents(half, [3, 4]), noise.half())


def test_bench_quality_says_which_file_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--quality", "--model", str(tmp_path)])
    assert bench.main() == 1
    assert "model_index.json is not there" in capsys.readouterr().out


def test_low_and_high_psnrs_are_those_of_the_worst_and_best_images() -> None:
    assert quality.low_median_high([math.inf] * 10 + [40.0 - one for one in range(10)]) == (32.0, math.inf, math.inf)
    assert quality.low_median_high([3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0)

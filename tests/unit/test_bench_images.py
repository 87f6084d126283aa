"""Whole images in the benchmark: what is compared is the same image."""
from __future__ import annotations

import pytest
import torch

pytest.importorskip("diffusers")

from lib_onediff.bench import images
from lib_onediff.bench.options import parse


@pytest.mark.parametrize("model", ["tiny-sd15", "tiny-sdxl"])
def test_every_pipeline_draws_the_hosts_image(model: str) -> None:
    options = parse(["--images", "--sizes", "64x64", "--steps", "7", "--runs", "1", "--dtype", "fp32"])
    host, *ours = images.images(model, options, torch.device("cpu"))
    assert host.pipeline == images.HOST and [row.pipeline for row in ours] == list(images.VARIANTS)
    for row in ours:
        assert row.route == "plain" and row.seconds > 0 and len(row.cells()) == len(images.HEADINGS)
        lossy = "DeepCache" in row.pipeline
        assert (1e-5 if lossy else 0) <= row.mean_difference < (0.2 if lossy else 1e-5), row

"""Draws the pictures of speed-and-quality.md for the options that also work on a CPU. Runs only with
`install.py --test --pictures`.

A picture has a row of images for each setting, with the same prompts and seed, and beside them the seconds for an image
and the PSNR.
"""
from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image
from webui_client import WebUI
from webui_process import HostProcess

from lib_onediff.bench.sheet import SheetRow, sheet
from lib_onediff.core.quality import compare
from lib_onediff.demo import SHIPPED_CFG_SCALE

FOLDER = Path(__file__).parents[2] / ".readme"
PROMPTS = (
    "a red apple on a white background", "a rocket on a blue background", "an owl on a yellow background",
    "a cat on a green background",
)
REQUEST = {"seed": 7, "width": 256, "height": 256, "sampler_name": "Euler", "cfg_scale": SHIPPED_CFG_SCALE}
ALONE = "Without OneDiff"


@dataclass(frozen=True)
class Feature:
    """A picture to draw: a row of images without OneDiff, and one for each setting.

    name: the file's name without ".jpg". rows: the label of each row, and the arguments of OneDiff's script. model:
    the demo's model, emoji-sd or emoji-dit. steps: sampling steps of an image.
    """
    name: str
    rows: dict[str, list[object]]
    model: str = "emoji-sd"
    steps: int = 30

    @property
    def settings(self) -> str:
        """The settings of the images, for the bottom of the picture."""
        return f"{self.model}, Euler, {self.steps} steps, CFG {SHIPPED_CFG_SCALE:g}, 256x256, seed 7, on two CPU cores"


FEATURES = (
    Feature("presets", {
        "Exact": [True, "Exact"], "Balanced": [True, "Balanced"], "Fast": [True, "Fast"],
        "Draft": [True, "Draft"],
    }),
    Feature("deepcache", {
        "Interval 2, depth 1": [{"deepcache_interval": 2, "deepcache_depth": 1}],
        "Interval 3, depth 3": [{"deepcache_interval": 3, "deepcache_depth": 3}],
        "Interval 3, depth 1": [{"deepcache_interval": 3, "deepcache_depth": 1}],
        "Interval 5, depth 1": [{"deepcache_interval": 5, "deepcache_depth": 1}],
    }),
    Feature("extrapolated", {
        "Interval 2, depth 0": [{"deepcache_interval": 2, "deepcache_depth": 0}],
        "Interval 3, depth 0": [{"deepcache_interval": 3, "deepcache_depth": 0}],
    }),
    Feature("transformers", {
        "Interval 2": [{"transformer_interval": 2}],
        "Interval 3": [{"transformer_interval": 3}],
    }, model="emoji-dit", steps=32),
    Feature("vae", {
        "VAE precision bf16": [{"vae_precision": "bf16"}],
    }),
    Feature("negative", {
        "Skip after 75 %": [{"skip_negative_after": 75}],
        "Skip after 50 %": [{"skip_negative_after": 50}],
    }),
)


@dataclass(frozen=True)
class Row:
    """The images of one setting, one for each prompt, and the median of the seconds that they took."""
    images: list[Image.Image]
    seconds: float

    def psnr(self, other: Row) -> float:
        """The median of the images' PSNR against another row's, in decibels; infinite for equal images."""
        return statistics.median(compare(own, its).psnr for own, its in zip(self.images, other.images, strict=True))


def made(webui: WebUI, steps: int, arguments: list[object]) -> Row:
    """Make a row of images, after one image that is not timed. arguments: those of OneDiff's script."""
    scripts = {"OneDiff": {"args": arguments}}
    images = []
    seconds = []
    for prompt in (PROMPTS[0], *PROMPTS):
        began = time.perf_counter()
        pictures = webui.txt2img(**REQUEST, steps=steps, prompt=prompt, alwayson_scripts=scripts)
        images.append(pictures.image.convert("RGB"))
        seconds.append(time.perf_counter() - began)
    return Row(images[1:], statistics.median(seconds[1:]))


def facts_of(row: Row, alone: Row) -> list[str]:
    """The text beside a row: the seconds for an image, and for a row with OneDiff the speedup and the PSNR against the
    row without it (alone)."""
    seconds = f"{row.seconds:.1f} s an image"
    if row is alone:
        return [seconds]
    distance = row.psnr(alone)
    psnr = "identical" if distance == math.inf else f"{distance:.1f} dB"
    return [f"{seconds}, {alone.seconds / row.seconds:.1f}x", psnr]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_the_picture_of_a_feature_is_drawn(
    feature: Feature, request: pytest.FixtureRequest, tmp_path: Path, standalone: WebUI,
) -> None:
    """Writes .readme/NAME.jpg in the repository, and checks only that it is no empty file. Skipped without
    --pictures."""
    if not request.config.getoption("--pictures"):
        pytest.skip("drawn with --pictures")
    other = None
    webui = standalone
    if feature.model != "emoji-sd":
        other = HostProcess("--port", "0", "--data-dir", str(tmp_path), "--model", feature.model)
        webui = WebUI(other.url())
    try:
        rows = {ALONE: made(webui, feature.steps, [False])}
        for label, arguments in feature.rows.items():
            rows[label] = made(webui, feature.steps, arguments)
    finally:
        if other is not None:
            other.stop()
    path = FOLDER / f"{feature.name}.jpg"
    shown = [SheetRow(label, facts_of(row, rows[ALONE]), row.images) for label, row in rows.items()]
    sheet(shown, PROMPTS, feature.settings).save(path, quality=92)
    assert path.stat().st_size > 10_000

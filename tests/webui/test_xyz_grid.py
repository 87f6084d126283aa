"""OneDiff's options as axes of a real WebUI's X/Y/Z plot script."""
from __future__ import annotations

from itertools import product
from typing import Any

import numpy
import pytest
from test_in_progress import InBackground
from webui_client import PICTURE, Pictures, WebUI, largest_difference, one_run
from webui_models import Models

PLOT = "x/y/z plot"
NOTHING = ("Nothing", "")
INTERVAL = "[OneDiff] DeepCache interval"
BACKEND = "[OneDiff] Backend"
VAE = "[OneDiff] VAE precision"
USE = "[OneDiff] Use OneDiff"
PRESET = "[OneDiff] Speed"
Axis = tuple[str, str]
SAMPLING = {"sampler_name": "Euler", "steps": 10}


@pytest.fixture(autouse=True)
def plotting(webui: WebUI, sd15: Models) -> None:
    if webui.is_standalone:
        pytest.skip("the standalone host has no X/Y/Z plot: give the address of another WebUI with --webui URL")


def arguments_of(webui: WebUI, tab: str) -> list[dict[str, Any]]:
    """The plot's script arguments, in their order."""
    scripts = webui.get("/sdapi/v1/script-info")
    (plot,) = [script for script in scripts if script["name"] == PLOT and script["is_img2img"] is (tab == "img2img")]
    return plot["args"]


def plotted(webui: WebUI, x: Axis, y: Axis = NOTHING, z: Axis = NOTHING, **request: Any) -> dict[str, Any]:
    """The request for a plot. An axis: its label, and its values separated by commas."""
    whole = {**PICTURE, **SAMPLING, **request}
    arguments = arguments_of(webui, "img2img" if "init_images" in whole else "txt2img")
    labels = arguments[0]["choices"]
    axes = [part for label, values in (x, y, z) for part in (labels.index(label), values, [])]
    legend = True
    lone_pictures = True
    sub_grids = False
    other_seeds = [False] * 4
    as_text = True
    rows = [0] if any(argument["label"] == "Row Count" for argument in arguments) else []  # Neo's: as many as need be.
    own = [False, False, 0] if webui.kind == "ldm_patched" else []  # reForge's: labels, no grid, pictures in a grid.
    return {
        **whole, "script_name": PLOT,
        "script_args": [*axes, legend, *own, lone_pictures, sub_grids, *other_seeds, *rows, 0, as_text],
    }


def alone(webui: WebUI, options: dict[str, Any], **request: Any) -> Pictures:
    """The image that a cell must equal: its options are OneDiff's script arguments in an ordinary request."""
    return webui.make({**PICTURE, **SAMPLING, **request, **one_run(**options)})


def assert_cell(grid: Pictures, cell: int, expected: Pictures) -> None:
    """Assert that a cell has this image and its infotext. The grid itself comes before the cells."""
    assert numpy.array_equal(grid.arrays[1 + cell], expected.arrays[0]), f"cell {cell}"
    assert onediff_in(grid, 1 + cell) == onediff_in(expected)


def onediff_in(pictures: Pictures, number: int = 0) -> str:
    """The value of OneDiff's key in an image's infotext."""
    return pictures.info["infotexts"][number].partition("OneDiff: ")[2].partition(",")[0]


def test_each_cell_of_a_plot_has_the_image_of_its_options_and_later_images_have_the_defaults(webui: WebUI) -> None:
    """The axes are DeepCache's interval and the preset; the interval overrides that of the preset. Each cell equals, to
    the bit, the image of a request with these options. After the plot, images equal those of before."""
    before = alone(webui, {})
    default = onediff_in(alone(webui, {}))
    intervals = (1, 3)
    presets = {"Exact": {}, "Balanced": {"deepcache_depth": 3}, "Off": {"enabled": False}}
    grid = webui.make(plotted(webui, (INTERVAL, "1, 3"), (PRESET, ", ".join(presets))))
    assert len(grid.images) == 1 + len(intervals) * len(presets)
    seen = set()
    for cell, (options, interval) in enumerate(product(presets.values(), intervals)):
        expected = alone(webui, {**options, "deepcache_interval": interval})
        assert_cell(grid, cell, expected)
        seen.add(onediff_in(expected))
    assert seen == {
        "on", "on; deepcache_interval 3", "on; speed Balanced", "off",
        "off; deepcache_interval 3",
    }
    assert not numpy.array_equal(grid.arrays[1], grid.arrays[2])
    after = alone(webui, {})
    assert largest_difference(after, before) == 0 and onediff_in(after) == default
    assert largest_difference(webui.txt2img(**SAMPLING), before) == 0


def test_after_an_interrupted_plot_images_and_their_options_are_those_of_before(webui: WebUI) -> None:
    """The plot is interrupted in its second image. Images after it equal those of before, and their infotext has
    OneDiff's defaults."""
    before = alone(webui, {})
    long = {"steps": 12 if webui.kind == "forge" else 60, "width": 128, "height": 128}
    plot = InBackground(webui, plotted(webui, (INTERVAL, "3, 4, 5, 6"), (VAE, "bf16"), **long))
    plot.wait_until(lambda progress: "2 out of 4" in progress["state"]["job"], "the second picture")
    plot.wait_for_step(2)
    assert webui.post("/sdapi/v1/interrupt").status_code == 200
    assert onediff_in(plot.pictures(), 1) == "on; deepcache_interval 3; vae_precision bf16"
    for after in (webui.txt2img(**SAMPLING), alone(webui, {})):
        assert largest_difference(after, before) == 0 and onediff_in(after) == onediff_in(before) == "on"
    assert webui.status()["enabled"] is True

"""OneDiff's options of a run, given in an API request by script arguments or otherwise: they override the settings and
are in the infotext."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from webui_client import OPTION_DEFAULTS, Pictures, WebUI, largest_difference, one_run
from webui_compare import assert_same, run_off, run_on
from webui_models import Models

from lib_onediff.ui.presets import BALANCED, PRESETS


def with_arguments(*arguments: Any) -> dict[str, Any]:
    return {"alwayson_scripts": {"OneDiff": {"args": list(arguments)}}}


def onediff_in(pictures: Pictures) -> str:
    """The value of the key OneDiff in the first image's infotext."""
    return pictures.info["infotexts"][0].partition("OneDiff: ")[2].partition(",")[0].strip()


# All of them change the picture of a small model on any machine; below 10 steps, those that leave steps out are
# inactive.
OPTIONS = {"vae_precision": "bf16", "deepcache_interval": 2, "deepcache_depth": 2, "skip_negative_after": 50}
TEN_STEPS = {"steps": 10, "sampler_name": "Euler", "negative_prompt": "snow"}


def by_settings(webui: WebUI) -> Pictures:
    with webui.options(**{f"onediff_{name}": value for name, value in OPTIONS.items()}):
        return webui.txt2img(**TEN_STEPS)


def by_overrides(webui: WebUI) -> Pictures:
    overrides = {f"onediff_{name}": value for name, value in OPTIONS.items()}
    # A1111 does not put an option back that was overridden and had never been saved.
    webui.set_options(**{name: OPTION_DEFAULTS[name] for name in overrides})
    return webui.txt2img(**TEN_STEPS, override_settings=overrides)


def by_changes(webui: WebUI) -> Pictures:
    """Options set by the text of extra options, on top of a preset that sets them otherwise."""
    own = {name: OPTION_DEFAULTS[f"onediff_{name}"] for name in PRESETS[BALANCED].values}
    words = "; ".join(f"{name} {value}" for name, value in {**own, **OPTIONS}.items())
    return webui.txt2img(**TEN_STEPS, **with_arguments(True, BALANCED, words))


def by_infotext(webui: WebUI) -> Pictures:
    """Options set by an infotext. Not on Forge, whose API answers every infotext with a TypeError; test_page.py pastes
    one there."""
    if webui.kind in ("standalone", "forge"):
        pytest.skip("this WebUI's API takes no infotext")
    infotext = webui.txt2img(**TEN_STEPS, **one_run(**OPTIONS)).info["infotexts"][0]
    return webui.txt2img(**TEN_STEPS, infotext=infotext)


@pytest.mark.parametrize("way", [by_settings, by_overrides, by_changes, by_infotext])
def test_options_set_in_every_way_make_the_same_image_and_do_not_outlast_it(
    webui: WebUI, sd15: Models, way: Callable[[WebUI], Pictures]
) -> None:
    """way: by the settings, by override_settings of the request, by the text of extra options, or by an infotext. The
    image equals that of the same options as a mapping in the script arguments; the next image has none of them. The
    X/Y/Z plot is tested in test_xyz_grid.py."""
    exact = webui.txt2img(**TEN_STEPS)
    expected = webui.txt2img(**TEN_STEPS, **one_run(**OPTIONS))
    assert largest_difference(expected, exact) > 0 and all(f"{name} " in onediff_in(expected) for name in OPTIONS)
    made = way(webui)
    assert largest_difference(made, expected) == 0 and onediff_in(made) == onediff_in(expected)
    after = webui.txt2img(**TEN_STEPS)
    assert largest_difference(after, exact) == 0 and onediff_in(after) == onediff_in(exact) == "on"


def test_onediff_disabled_in_the_settings_has_no_hook_whatever_a_run_asks_for(webui: WebUI, sd15: Models) -> None:
    """The images equal, bit for bit, that of a run with OneDiff off, and no call is counted."""
    off = run_off(webui, {})
    with webui.options(onediff_enabled=False):
        assert webui.status()["enabled"] is False
        for arguments in ({}, with_arguments(True), one_run(enabled=True)):
            before = webui.status()
            made = webui.txt2img(**arguments)
            after = webui.status()
            assert (after["calls"], after["vae"]["calls"]) == (before["calls"], before["vae"]["calls"])
            assert largest_difference(made, off.pictures) == 0
        assert webui.status()["hooks"] == 0
    assert webui.status()["enabled"] is True
    assert_same(run_on(webui, {}), off)


def test_status_and_infotext_describe_the_last_image(webui: WebUI, sd15: Models) -> None:
    """The status has the image's size, model, times and route. One image is made with OneDiff on, and then one with
    OneDiff off for the run."""
    made = run_on(webui, {"width": 128, "height": 64}).pictures
    status = webui.status()
    assert status["host"] == webui.kind
    assert (status["hooks"], status["enabled"], status["resolution"]) == (1, True, "128x64")
    assert status["model"] == ("SD1" if status["host"] != "standalone" else "SD 1.x UNet, small (prompt width 64)")
    assert status["step_ms"] > 0 and status["host_ms"] > 0
    # A slow WebUI is timed once and no more while somebody waits, and one time says nothing.
    assert status["ratio"] in (None, pytest.approx(status["host_ms"] / status["step_ms"]))
    assert status["route"] == "graph" or (status["route"] == "plain" and status["reason"])
    assert onediff_in(made) == "on" and made.image.info["parameters"] == made.info["infotexts"][0]
    off = run_off(webui, {"width": 128, "height": 64}).pictures
    assert onediff_in(off) == "off" and webui.status()["route"] == "host"

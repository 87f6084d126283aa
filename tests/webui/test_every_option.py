"""Every option of a generation by every way to give it: the same picture, the same infotext, and nothing left."""
from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grid import WHOLE
from test_xyz_grid import NOTHING, onediff_in, plotted
from webui_client import PICTURE, Pictures, WebUI, largest_difference, one_run
from webui_models import Models

OPTIONS_PAGE = Path(__file__).parents[2] / ".readme" / "options.md"
# Below 10 steps, DeepCache and the end of guidance rest.
TEN_STEPS = {"steps": 10, "sampler_name": "Euler"}
CACHED = {"deepcache_interval": 3}
# Each with a value that is not its default, what else it needs to count, and of the request.
OPTIONS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "enabled": (False, {}, {}),
    "backend": ("eager", {}, {}),
    "vae_precision": ("bf16", {}, {}),
    "matmul_accumulation": ("half", {}, {}),
    "convolution_accumulation": ("half", {}, {}),
    "low_bit": ("int8", {}, {}),
    "low_bit_budget": (0.05, {"low_bit": "int8"}, {}),
    "low_bit_only": (True, {"low_bit": "int8"}, {}),
    "deepcache_interval": (2, {}, {}),
    "deepcache_depth": (2, CACHED, {}),
    "guidance_end": (0.5, {}, {"negative_prompt": "snow"}),
}
# Those that change the picture of a small model on any machine.
SEEN = (
    "vae_precision", "deepcache_interval", "deepcache_depth", "guidance_end",
)


def table() -> dict[str, tuple[str, str]]:
    """The label and the default of every option, from the table of the docs, which a unit test holds to settings.py."""
    page = OPTIONS_PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|`]+) \(`(\w+)`\) \|[^|]*\| ([^|]*?) ?\|", page, re.M)
    return {name: (label, default) for label, name, default in rows}


def default_of(name: str) -> Any:
    """An option's default, of the type of the value that it is given here."""
    kind, written = type(OPTIONS[name][0]), table()[name][1]
    return written == "on" if kind is bool else kind(written)


def word(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def by_settings(webui: WebUI, options: dict[str, Any], request: dict[str, Any]) -> Pictures:
    webui.set_options(**{f"onediff_{name}": value for name, value in options.items()})
    try:
        return webui.txt2img(**request)
    finally:
        webui.set_options(**{f"onediff_{name}": default_of(name) for name in options})


def by_argument(webui: WebUI, options: dict[str, Any], request: dict[str, Any]) -> Pictures:
    return webui.txt2img(**request, **one_run(**options))


def by_changes(webui: WebUI, options: dict[str, Any], request: dict[str, Any]) -> Pictures:
    words = "; ".join(f"{name} {word(value)}" for name, value in options.items() if name != "enabled")
    given = [options.get("enabled", True), "As in the settings", words]
    return webui.txt2img(**request, alwayson_scripts={"OneDiff": {"args": given}})


def by_overrides(webui: WebUI, options: dict[str, Any], request: dict[str, Any]) -> Pictures:
    overrides = {f"onediff_{name}": value for name, value in options.items()}
    return webui.txt2img(**request, override_settings=overrides)


def by_infotext(webui: WebUI, options: dict[str, Any], request: dict[str, Any]) -> Pictures:
    return webui.txt2img(**request, infotext=by_argument(webui, options, request).info["infotexts"][0])


def by_plot(webui: WebUI, options: dict[str, Any], request: dict[str, Any]) -> Pictures:
    """The last of the options is the axis."""
    *others, (name, value) = options.items()
    axis = f"[OneDiff] {table()[name][0]}", word(value)
    whole = plotted(webui, axis, NOTHING, **{**PICTURE, **request}, **one_run(**dict(others)))
    grid = webui.make(whole)
    # The grid comes first, and then its one cell, where the host does not leave a grid of one away.
    grid.images = grid.images[-1:]
    grid.info["infotexts"] = grid.info["infotexts"][-1:]
    return grid


WAYS: dict[str, Callable[[WebUI, dict[str, Any], dict[str, Any]], Pictures]] = {
    "settings": by_settings, "changes": by_changes, "overrides": by_overrides, "infotext": by_infotext, "plot": by_plot,
}
# The standalone host has no X/Y/Z plot and its API takes no infotext. Forge's answers every infotext with a TypeError
# of its own; test_page.py pastes one.
LACKING = {"standalone": ("infotext", "plot"), "forge": ("infotext",)}


@pytest.fixture(scope="module")
def made_once(webui: WebUI) -> Callable[[dict[str, Any], dict[str, Any]], Pictures]:
    """The image of a request with options, made once."""
    made: dict[str, Pictures] = {}

    def image(options: dict[str, Any], request: dict[str, Any]) -> Pictures:
        key = str((options, request))
        if key not in made:
            made[key] = by_argument(webui, options, request)
        return made[key]

    return image


def ways_for(webui: WebUI, name: str) -> list[str]:
    """Every way that the WebUI has; on a CPU the standalone host is given each option by one of them, in turn."""
    ways = [way for way in WAYS if way not in LACKING.get(webui.kind, ())]
    return ways if WHOLE or not webui.is_standalone else [ways[list(OPTIONS).index(name) % len(ways)]]


@pytest.mark.parametrize("name", OPTIONS)
def test_every_way_makes_the_same_picture_and_leaves_nothing(
    webui: WebUI, sd15: Models, made_once: Callable[[dict[str, Any], dict[str, Any]], Pictures], name: str
) -> None:
    value, others, changes = OPTIONS[name]
    request, options = {**TEN_STEPS, **changes}, {**others, name: value}
    before = made_once({}, request)
    expected = by_argument(webui, options, request)
    assert word(value) in onediff_in(expected) and (name == "enabled" or name in onediff_in(expected))
    for way in ways_for(webui, name):
        made = WAYS[way](webui, options, request)
        assert largest_difference(made, expected) == 0, way
        # Switched off in the settings tab, OneDiff is not there at all and says nothing.
        assert onediff_in(made) == ("" if (name, way) == ("enabled", "settings") else onediff_in(expected)), way
        after = by_argument(webui, {}, request)
        assert largest_difference(after, before) == 0 and onediff_in(after) == onediff_in(before), way
    if name in SEEN:
        assert largest_difference(expected, made_once(others, request)) > 0

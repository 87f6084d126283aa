"""Script arguments over the API, and the infotext that tells of them."""
from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from webui_client import WebUI, largest_difference
from webui_compare import assert_same, run_off, run_on
from webui_models import Models

WRONG = {
    "unknown option": ({"speed": 9}, "no option 'speed'"),
    "wrong kind": ({"enabled": "yes"}, "enabled"),
    "unknown choice": ({"backend": "warp"}, "backend"),
    "option for the whole WebUI": ({"memory_budget": 5}, "memory_budget"),
    "path from a client": ({"cache_folder": "/tmp/onediff"}, "cache_folder"),
    "list": ([True], "mapping"),
    "text": ("on", "mapping"),
    "number": (1, "mapping"),
}


def with_arguments(*arguments: Any) -> dict[str, Any]:
    return {"alwayson_scripts": {"OneDiff": {"args": list(arguments)}}}


def with_argument(argument: Any) -> dict[str, Any]:
    return with_arguments(argument)


@pytest.mark.parametrize("argument, part", WRONG.values(), ids=WRONG.keys())
def test_wrong_argument_is_told_and_costs_no_picture(webui: WebUI, sd15: Models, argument: Any, part: str) -> None:
    off = run_off(webui, {})
    before = webui.calls()
    made = webui.txt2img(**with_argument(argument))
    after = webui.calls()
    told = f"{made.info} {webui.status()['reason']}"
    assert part in told, f"the refusal is told neither in the answer's info nor in the status: {told[-400:]}"
    assert after["host"] - before["host"] == off.calls["host"]
    assert (after["plain"], after["graph"]) == (before["plain"], before["graph"])
    assert largest_difference(made, off.pictures) == 0
    assert webui.status()["enabled"] is True, "one request switched OneDiff off for good"


def test_checkbox_argument(webui: WebUI, sd15: Models) -> None:
    for ticked, route in ((False, "host"), (True, "plain")):
        before = webui.calls()
        webui.txt2img(**with_argument(ticked))
        grown = {name: count - before[name] for name, count in webui.calls().items()}
        if route == "plain":
            assert grown["plain"] + grown["graph"] >= 3 and grown["host"] == 0, grown
        else:
            assert grown["host"] >= 3 and grown["plain"] == grown["graph"] == 0, grown


def test_without_arguments_it_is_on(webui: WebUI, sd15: Models) -> None:
    before = webui.calls()
    webui.txt2img()
    after = webui.calls()
    assert after["plain"] + after["graph"] >= before["plain"] + before["graph"] + 3
    assert after["host"] == before["host"]


def test_backend_of_one_run(webui: WebUI, sd15: Models) -> None:
    before = webui.status()
    webui.txt2img(**with_argument({"backend": "eager"}))
    after = webui.status()
    assert after["calls"]["graph"] == before["calls"]["graph"]
    assert after["calls"]["plain"] >= before["calls"]["plain"] + 3


@pytest.mark.parametrize("arguments, expected", [
    ((True, "Balanced"), "on; deepcache_interval 3; deepcache_depth 3"),
    ((True, "Balanced", "deepcache_depth 1; vae_precision fp32"), "on; deepcache_interval 3; vae_precision fp32"),
    ((True, "As in the settings", "backend eager"), "on; backend eager"),
    (({"deepcache_interval": 4}, "Balanced", "deepcache_interval 5"), "on; deepcache_interval 4; deepcache_depth 3"),
    ((False, "Balanced"), "off; deepcache_interval 3; deepcache_depth 3"),
    # What earlier versions call Exact, and options that they had.
    ((True, "Quality first", "off; tf32 on; verify off"), "off"),
], ids=str)
def test_preset_and_changes_of_one_run(webui: WebUI, sd15: Models, arguments: tuple[Any, ...], expected: str) -> None:
    with webui.options(onediff_deepcache_depth=2) if arguments[1] != "As in the settings" else nullcontext():
        infotext = webui.txt2img(**with_arguments(*arguments)).info["infotexts"][0]
    assert infotext.partition("OneDiff: ")[2].partition(",")[0].strip() == expected


@pytest.mark.parametrize("arguments, part", [
    ((True, "Fastest"), "no preset 'Fastest'"), ((True, 3), "second script argument"),
    ((True, "Balanced", "speed 9"), "no option 'speed'"), ((True, "Balanced", ["off"]), "third script argument"),
], ids=str)
def test_wrong_preset_or_changes_are_told_and_cost_no_picture(
    webui: WebUI, sd15: Models, arguments: tuple[Any, ...], part: str
) -> None:
    before = webui.calls()
    made = webui.txt2img(**with_arguments(*arguments))
    after = webui.calls()
    assert part in f"{made.info} {webui.status()['reason']}"
    assert after["host"] > before["host"] and (after["plain"], after["graph"]) == (before["plain"], before["graph"])


def test_infotext_of_a_request_sets_the_run(webui: WebUI, sd15: Models) -> None:
    if webui.is_standalone:
        pytest.skip("the standalone host's API takes no infotext")
    for options in ({"deepcache_interval": 2}, {"deepcache_interval": 3, "low_bit_only": True}):
        infotext = webui.txt2img(**with_argument(options)).info["infotexts"][0]
        said = infotext.partition("OneDiff: ")[2].partition(",")[0].strip()
        with webui.options(onediff_deepcache_depth=2):
            again = webui.txt2img(infotext=infotext).info["infotexts"][0]
        assert again.partition("OneDiff: ")[2].partition(",")[0].strip() == said


def test_disabled_in_the_settings(webui: WebUI, sd15: Models) -> None:
    """OneDiff has no hook in place, whatever a run asks for; images are those of a run without it, bit for bit."""
    off = run_off(webui, {})
    with webui.options(onediff_enabled=False):
        assert webui.status()["enabled"] is False
        for argument in ({}, with_argument(True), with_argument({"enabled": True})):
            before = webui.calls()
            made = webui.txt2img(**argument)
            after = webui.calls()
            assert [after[route] - before[route] for route in ("graph", "plain", "blocks")] == [0, 0, 0]
            assert largest_difference(made, off.pictures) == 0
        assert webui.status()["hooks"] == 0
    assert webui.status()["enabled"] is True
    assert_same(run_on(webui, {}), off)


def test_overridden_option_holds_for_one_picture(webui: WebUI, sd15: Models) -> None:
    webui.set_options(onediff_enabled=True)  # A1111 does not put back what was never saved.
    before = webui.calls()
    webui.txt2img(override_settings={"onediff_enabled": False})
    after = webui.calls()
    assert after["host"] >= before["host"] + 3 and after["plain"] == before["plain"]
    run_on(webui, {})
    assert webui.status()["enabled"] is True


def test_cache_folder_cannot_be_set_over_the_api(webui: WebUI) -> None:
    for name in ("onediff_cache_folder", "onediff_folder_in_use"):
        webui.post("/sdapi/v1/options", {name: "/tmp/onediff-from-a-client"})
        assert "/tmp/onediff-from-a-client" not in map(str, webui.get("/sdapi/v1/options").values())


def test_status_describes_the_last_picture(webui: WebUI, sd15: Models) -> None:
    run_on(webui, {"width": 128, "height": 64})
    status = webui.status()
    assert status["host"] == webui.kind
    assert status["hooks"] == 1
    assert status["enabled"] is True
    assert status["resolution"] == "128x64"
    assert status["model"] == ("SD1" if status["host"] != "standalone" else "SD 1.x UNet, small (prompt width 64)")
    assert status["step_ms"] > 0 and status["host_ms"] > 0
    # A slow WebUI is timed once and no more while somebody waits, and one time says nothing.
    assert status["ratio"] in (None, pytest.approx(status["host_ms"] / status["step_ms"]))
    assert status["route"] in ("plain", "graph")
    assert status["reason"] or status["route"] == "graph"
    run_off(webui, {"width": 128, "height": 64})
    assert webui.status()["route"] == "host"


def test_infotext_tells_of_onediff(webui: WebUI, sd15: Models) -> None:
    made = run_on(webui, {}).pictures
    infotext = made.info["infotexts"][0]
    assert "OneDiff: " in infotext
    assert made.image.info["parameters"] == infotext
    assert "OneDiff: " in webui.txt2img().info["infotexts"][0]
    assert infotext.split("OneDiff: ")[1] != run_off(webui, {}).pictures.info["infotexts"][0].partition("OneDiff: ")[2]

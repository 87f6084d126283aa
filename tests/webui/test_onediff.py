"""The extension on against off: the same picture, by the route that the status endpoint reports."""
from __future__ import annotations

from typing import Any

import pytest
from webui_client import Pictures, WebUI, gradient, largest_difference, one_run


def on_and_off(webui: WebUI, **request: Any) -> tuple[Pictures, Pictures]:
    """The same picture with the extension on and off; asserts which route made each."""
    before = webui.calls()
    on = webui.txt2img(**request)
    after_on = webui.calls()
    assert webui.status()["route"] in ("plain", "graph")
    assert after_on["host"] == before["host"], webui.status()["reason"]
    assert after_on["plain"] + after_on["graph"] > before["plain"] + before["graph"]

    off = webui.txt2img(**request, **one_run(enabled=False))
    after_off = webui.calls()
    assert webui.status()["route"] == "host"
    assert after_off["host"] > after_on["host"]
    assert (after_off["plain"], after_off["graph"]) == (after_on["plain"], after_on["graph"])
    return on, off


@pytest.mark.parametrize("request_fields", [
    {},
    {"width": 72, "height": 88},
    {"width": 128, "height": 64, "batch_size": 2},
    {"prompt": "a long story of many words " * 9, "negative_prompt": "rain"},
    {"cfg_scale": 1},
    {"sampler_name": "Heun"},
    {"sampler_name": "LCM"},
], ids=lambda fields: ", ".join(fields) or "plain")
def test_on_and_off_agree(webui: WebUI, request_fields: dict[str, Any]) -> None:
    on, off = on_and_off(webui, **request_fields)
    assert largest_difference(on, off) <= 1


def test_on_and_off_agree_in_img2img(webui: WebUI) -> None:
    on = webui.img2img(gradient(64, 64))
    assert webui.status()["route"] in ("plain", "graph")
    off = webui.img2img(gradient(64, 64), **one_run(enabled=False))
    assert webui.status()["route"] == "host"
    assert largest_difference(on, off) <= 1


def test_status_describes_the_last_picture(webui: WebUI) -> None:
    webui.txt2img(width=128, height=64)
    status = webui.status()
    assert status["enabled"] is True
    assert status["resolution"] == "128x64"
    assert status["model"]
    assert status["step_ms"] > 0
    assert status["host_ms"] > 0
    assert status["ratio"] == pytest.approx(status["host_ms"] / status["step_ms"])
    assert status["reason"] or status["route"] == "graph"


def test_checkbox_argument(webui: WebUI) -> None:
    host_calls = webui.calls()["host"]
    webui.txt2img(alwayson_scripts={"OneDiff": {"args": [False]}})
    assert webui.calls()["host"] > host_calls


def test_options_switch_it_off_and_on(webui: WebUI) -> None:
    assert webui.post("/sdapi/v1/options", {"onediff_enabled": False}).status_code == 200
    try:
        assert webui.status()["enabled"] is False
        off = webui.txt2img()
        assert webui.status()["route"] == "host"
        off_by_default = webui.txt2img(alwayson_scripts={"OneDiff": {"args": [True]}})
        assert webui.status()["route"] == "host", "the checkbox does not overrule the settings"
        on = webui.txt2img(**one_run(enabled=True))
        assert webui.status()["route"] in ("plain", "graph")
    finally:
        webui.post("/sdapi/v1/options", {"onediff_enabled": True})
    assert off.files == off_by_default.files
    assert largest_difference(on, off) <= 1
    assert webui.status()["enabled"] is True


def test_overridden_options_hold_for_one_picture(webui: WebUI) -> None:
    webui.txt2img(override_settings={"onediff_enabled": False})
    assert webui.status()["route"] == "host"
    webui.txt2img()
    assert webui.status()["route"] in ("plain", "graph")
    assert webui.status()["enabled"] is True


def test_wrong_script_argument_does_not_stop_the_picture(webui: WebUI) -> None:
    assert webui.txt2img(**one_run(speed="ludicrous")).image.size == (64, 64)
    assert webui.status()["enabled"] is True

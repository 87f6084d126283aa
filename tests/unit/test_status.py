"""The status as HTML for a page: its facts, escaped, and only those of the loaded model."""
from __future__ import annotations

import html
import re

import pytest

pytest.importorskip("gradio")
pytest.importorskip("fastapi")


from lib_onediff.core.settings import OFF_IN_SETTINGS, Settings
from lib_onediff.hosts.contract import WebUI
from lib_onediff.runtime.runtime import runtime
from lib_onediff.runtime.vae.route import OURS
from lib_onediff.ui import status

STATUS = {
    "enabled": True, "model": "<b>SD1</b>", "backend": "eager", "resolution": "64x72", "route": "plain",
    "reason": "a & b", "step_ms": 12.345, "host_ms": 24.69, "ratio": 2.0, "relative_error": None,
    "calls": {"graph": 0, "plain": 3, "host": 0},
}


def test_the_status_line_shows_every_fact_with_its_text_html_escaped() -> None:
    line = status.status_html(STATUS)
    for part in ("without CUDA graphs", "2.0x faster", "12.3 ms (WebUI 24.7 ms)", "64x72", "&lt;b&gt;SD1&lt;/b&gt;",
                 "a &amp; b"):
        assert part in line
    assert "<b>SD1" not in line


def test_the_status_says_why_a_model_is_not_served() -> None:
    """The status line also has the notes and faults, HTML-escaped."""
    found = status.current_status(WebUI("SomeUI 3", "not served yet"))
    assert found["route"] == "host" and found["reason"] == "not served yet" and not found["served"]
    assert (found["release"], found["hooks"], found["notes"]) == ("SomeUI 3", 0, [])
    line = status.status_html({**found, "notes": ["Sage is not used."], "faults": ["a fault <of> ours"]})
    assert "not served yet" in line and "Sage is not used." in line and "a fault &lt;of&gt; ours" in line


def test_the_status_of_a_model_that_is_not_served_shows_no_speed_of_the_last_served_model(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime still has the values of the last served model."""
    last = {**runtime.status(), **STATUS, "image": {"seconds": 2.0, "host_seconds": None, "steps": {"whole": 3}}}
    last["deepcache"] = {"full": 3, "cached": 0, "reason": "DeepCache is inactive: few steps"}
    monkeypatch.setattr(runtime, "status", lambda: last)
    served, refused = (status.current_status(WebUI("UI", why)) for why in ("", "its network is a Flux"))
    for shown in (status.summary_html, status.status_html):
        assert "12.3 ms" in shown(served) and "2.0x faster" in shown(served) and "2.0 s" in shown(served)
        for absent in ("12.3 ms", "2.0x faster", "2.0 s", "SD1", "64x72", "few steps"):
            assert absent not in shown(refused)
    assert "its network is a Flux" in status.status_html(refused)


def test_the_status_says_that_onediff_is_switched_off() -> None:
    """OneDiff is off in the settings. The accordion's checkbox applies to one run at a time and stays ticked, so that
    only the status shows it."""
    runtime.configure(Settings(enabled=False))
    found = status.current_status(WebUI("SomeUI 3", ""))
    assert (found["route"], found["reason"], found["enabled"]) == ("host", f"{OFF_IN_SETTINGS}.", False)
    runtime.configure(Settings())
    assert status.current_status(WebUI("SomeUI 3", "not served yet"))["reason"] == "not served yet"


def test_nothing_of_the_last_image_is_shown_while_onediff_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime still has the values of the last image that OneDiff made. Since then, the WebUI alone has made and
    decoded the images."""
    last = {**runtime.status(), **STATUS, "vae": {"route": OURS, "reason": ""}}
    monkeypatch.setattr(runtime, "status", lambda: last)
    shown = status.status_html(status.current_status(WebUI("UI", "")))
    assert "VAE: accelerated" in shown and "12.3 ms" in shown
    runtime.configure(Settings(enabled=False))
    shown = status.status_html(status.current_status(WebUI("UI", "")))
    runtime.configure(Settings())
    assert OFF_IN_SETTINGS in html.unescape(shown) and "VAE" not in shown and "12.3 ms" not in shown


def test_the_speedup_is_that_of_the_image_if_that_of_the_steps_is_unknown() -> None:
    """2.5x: the WebUI's 5.0 s divided by OneDiff's 2.0 s."""
    made = {**STATUS, "ratio": None, "image": {"seconds": 2.0, "host_seconds": 5.0, "steps": {"whole": 20}}}
    shown = re.sub("<.*?>", "", status.summary_html(made))
    assert shown.startswith("2.0 s/image (WebUI 5.0 s), 12.3 ms/step (WebUI 24.7 ms), 2.5x faster, ")


def test_a_bar_shows_the_parts_of_the_time_of_an_image_beside_a_bar_of_the_time_of_the_webui() -> None:
    """Widths are percentages of the longer time. If the WebUI's time is unknown, its bar is missing. An interrupted
    image, and one without known times, have no bars."""
    image = {"seconds": 2.0, "host_seconds": 5.0, "state": "done", "steps": {"whole": 20},
             "spent": {"unet": 1.2, "first_use": 0.0, "vae": 0.5, "rest": 0.3}}
    shown = status.spent_html({**STATUS, "image": image})
    assert "OneDiff, 2.0 s" in shown and "WebUI, 5.0 s" in shown and "first use" not in shown
    for part in ('onediff-of-unet" style="width: 24.0%"', 'onediff-of-webui" style="width: 100.0%"', "VAE 0.5 s"):
        assert part in shown
    assert "WebUI" not in status.spent_html({**STATUS, "image": {**image, "host_seconds": None}})
    for other in ({**image, "state": "interrupted"}, {**image, "spent": {}}, {}):
        assert status.spent_html({**STATUS, "image": other}) == ""

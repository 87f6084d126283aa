"""What must not add up: reloads of the UI, and checkpoint switches."""
from __future__ import annotations

import time
from urllib.parse import urlsplit

import pytest
import requests
from webui_client import WebUI
from webui_compare import assert_same, need, on_and_off, run_off, run_on
from webui_models import Models

RELOADS = 5
SECONDS_TO_RELOAD = 180
SECONDS_OF_PAGE_EVENTS = 10
SETTLED_AFTER = 5  # switches, after which the host has everything that it keeps
MOST_GROWTH = 1.05


def page_id(webui: WebUI) -> str | None:
    """What gradio gives a page that it has built anew another of; None while nothing answers."""
    try:
        answer = requests.get(webui.url + "/app_id", timeout=10)
        scripts = requests.get(webui.url + "/sdapi/v1/script-info", timeout=10)
        ready = scripts.ok and any(script["name"] == "onediff" and script["args"] for script in scripts.json())
        # A host calls the extensions' app_started last of all.
        ready = ready and webui.has("/onediff/v1/status")
    except (requests.RequestException, ValueError):
        return None
    return answer.text if answer.ok and ready else None


def reload_ui(browser, webui: WebUI) -> None:
    before = page_id(webui)
    assert before
    browser.open(webui.url)
    # gradio 3 waits for ever for an event that the page sent while it was closing.
    time.sleep(SECONDS_OF_PAGE_EVENTS)
    browser.choose_tab("Settings")
    browser.find("#settings_restart_gradio").click()
    deadline = time.monotonic() + SECONDS_TO_RELOAD
    while page_id(webui) in (None, before):
        assert time.monotonic() < deadline, "the UI did not come back"
        time.sleep(0.5)


def test_five_reloads_leave_one_hook(webui: WebUI, sd15: Models, browser) -> None:
    need(webui, "UI reload")
    off, on = run_off(webui, {}), run_on(webui, {})
    for reload in range(1, RELOADS + 1):
        reload_ui(browser, webui)
        again, _ = on_and_off(webui, {})
        assert webui.status()["hooks"] == 1, f"after reload {reload}"
        assert again.calls == on.calls, f"after reload {reload}: calls of one picture are counted {again.calls}"
        assert_same(again, on)
        assert_same(run_off(webui, {}), off)
    browser.open(webui.url)
    for elem_id in ("onediff_txt2img_accordion", "onediff_img2img_accordion", "tab_onediff"):
        assert len(browser.driver.find_elements("css selector", f"[id='{elem_id}']")) == 1


def process_of(webui: WebUI):
    """The WebUI's process; skips the test when it is not on this machine."""
    psutil = pytest.importorskip("psutil", reason="psutil is needed to see the WebUI's memory")
    address = urlsplit(webui.url)
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == address.port and connection.pid:
            return psutil.Process(connection.pid)
    pytest.skip(f"no process of this machine that we may look at listens on port {address.port}: run the tests there")


@pytest.mark.parametrize("one, other", [("sd15", "sd15-b"), ("twin", "twin-b")], ids=lambda role: role)
def test_memory_after_many_checkpoint_switches(
    webui: WebUI, sd15: Models, pytestconfig: pytest.Config, one: str, other: str
) -> None:
    need(webui, "checkpoint switch")
    process = process_of(webui)
    switches = pytestconfig.getoption("--switches", default=40)
    assert switches > 2 * SETTLED_AFTER, "too few switches to see growth: give more with --switches"
    levels = []
    roles = (other, one)
    sd15.use(one)
    run_on(webui, {})
    for switch in range(switches):
        sd15.use(roles[switch % 2])
        run_on(webui, {})
        levels.append(process.memory_info().rss)
    settled = levels[SETTLED_AFTER - 1]
    growth = [round(level / settled, 3) for level in levels]
    assert growth[-1] <= MOST_GROWTH, f"memory by switch, of the level after the fifth: {growth}"
    assert webui.status()["hooks"] == 1

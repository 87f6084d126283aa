"""Hooks, parts of the page and memory do not accumulate over reloads of the UI and switches of the checkpoint."""
from __future__ import annotations

import socket
import time
from urllib.parse import urlsplit

import pytest
import requests
from webui_client import WebUI
from webui_compare import assert_same, assert_same_on_and_off, need, run_off, run_on
from webui_models import Models

RELOADS = 5
SECONDS_TO_RELOAD = 180
SECONDS_OF_PAGE_EVENTS = 10
SECONDS_TO_ADD_ROUTES = 8
# The switch after which the WebUI holds all memory that it keeps, and the allowed ratio of later memory to that.
SETTLED_AFTER = 5
MOST_GROWTH = 1.05


def page_id(webui: WebUI) -> str | None:
    """The id that gradio gives to a page, which changes when the page is built anew; None until the page, its API and
    OneDiff's routes answer."""
    try:
        answer = requests.get(webui.url + "/app_id", timeout=10)
        scripts = requests.get(webui.url + "/sdapi/v1/script-info", timeout=10)
        ready = scripts.ok and any(script["name"] == "onediff" and script["args"] for script in scripts.json())
        # A host calls the extensions' app_started last of all.
        ready = ready and webui.has("/onediff/v1/status")
    except (requests.RequestException, ValueError):
        return None
    return answer.text if answer.ok and ready else None


def listens(webui: WebUI) -> bool:
    """Whether the WebUI accepts connections."""
    address = urlsplit(webui.url)
    try:
        socket.create_connection((address.hostname, address.port or 80), timeout=5).close()
    except OSError:
        return False
    return True


def reload_ui(browser, webui: WebUI) -> None:
    """Click "Reload UI" and wait until everything answers again. The browser shows an empty page afterwards."""
    before = page_id(webui)
    assert before
    browser.open(webui.url)
    # gradio 3 never ends what a page had asked of its queue when it was left, and a reload waits for that.
    time.sleep(SECONDS_OF_PAGE_EVENTS)
    browser.choose_tab("Settings")
    browser.find("#settings_restart_gradio").click()
    browser.wait(lambda: not listens(webui), "the old page's end", SECONDS_TO_RELOAD)
    # The page would reload itself while the WebUI starts, and again be left in the middle of it.
    browser.driver.get("about:blank")
    browser.wait(lambda: listens(webui), "the new page: the WebUI does not end its old connections", SECONDS_TO_RELOAD)
    # A request before A1111 has added its API's middleware ends the process.
    time.sleep(SECONDS_TO_ADD_ROUTES)
    browser.wait(lambda: page_id(webui) not in (None, before), "the new page and its routes", SECONDS_TO_RELOAD)


def test_five_reloads_of_the_ui_leave_one_hook_one_accordion_and_the_same_images(
    webui: WebUI, sd15: Models, browser
) -> None:
    """Images match those from before the reloads (no pixel differs by more than 1 of 255), with OneDiff on and off. A
    second hook would count the calls of an image twice."""
    need(webui, "UI reload")
    off = run_off(webui, {})
    on = run_on(webui, {})
    for reload in range(1, RELOADS + 1):
        reload_ui(browser, webui)
        again, _ = assert_same_on_and_off(webui, {})
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
def test_memory_does_not_grow_over_many_checkpoint_switches(
    webui: WebUI, sd15: Models, pytestconfig: pytest.Config, one: str, other: str
) -> None:
    """The WebUI's resident memory after the last of --switches switches is at most MOST_GROWTH times that after the
    fifth. glibc keeps freed weights that lie between others, so start the WebUI as its own launcher does, with
    tcmalloc, or with MALLOC_ARENA_MAX=1 and MALLOC_MMAP_THRESHOLD_=1048576."""
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

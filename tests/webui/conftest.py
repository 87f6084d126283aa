"""Tests of a whole WebUI with the extension, over HTTP and in a browser. The WebUI is the demo, started here, or with
--webui URL one that is running."""
from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from webui_client import WebUI
from webui_models import Models, models_named, without_hash
from webui_process import HostProcess


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("webui")
    group.addoption("--webui", metavar="URL", help="test the WebUI at this address, not the standalone host")
    group.addoption("--models", metavar="FILE.json", help="role to name of the models to test with")
    group.addoption("--model", metavar="ROLE=NAME", action="append", default=[], help="the same for one role")
    group.addoption("--switches", type=int, default=40, help="how many checkpoint switches the memory test makes")


@pytest.fixture(scope="session")
def webui(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebUI]:
    """The WebUI under test. A demo that is started here is stopped after the session, and must not have printed a
    traceback."""
    url = request.config.getoption("--webui", default=None)
    if url:
        yield WebUI(url)
        return
    # With random weights, every word of a prompt changes the image; with emoji-sd, which the documentation shows, not.
    model = [] if request.config.getoption("--pictures") else ["--model", str(random_model(tmp_path_factory))]
    data_folder = str(tmp_path_factory.mktemp("data"))
    host = HostProcess("--port", "0", "--data-dir", data_folder, *model)
    yield WebUI(host.url())
    host.stop()
    assert "Traceback" not in host.output, host.output


def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny SD 1.5 pipeline of random weights."""
    from tiny_model import tiny_sd15_pipeline

    folder = tmp_path_factory.mktemp("model") / "random-tiny-sd15"
    tiny_sd15_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def still_there(request: pytest.FixtureRequest) -> None:
    """Stop the session as soon as the WebUI at --webui no longer answers."""
    url = request.config.getoption("--webui", default=None)
    try:
        if url:
            requests.get(url, timeout=300)
    except requests.ConnectionError:
        pytest.exit(f"no WebUI answers at {url}", returncode=2)


@pytest.fixture
def standalone(webui: WebUI) -> WebUI:
    """The WebUI under test, for tests of behaviour that only the demo has; skips them elsewhere."""
    if not webui.is_standalone:
        pytest.skip("promised by the standalone host only")
    return webui


@pytest.fixture(scope="session")
def models(request: pytest.FixtureRequest, webui: WebUI) -> Iterator[Models]:
    """The models of the WebUI under test. Its first checkpoint is loaded again at the end."""
    option = request.config.getoption
    found = Models(webui, models_named(option("--models", default=None), option("--model", default=[])))
    first = found.loaded()
    yield found
    with contextlib.suppress(requests.ConnectionError):  # If the WebUI has stopped, still_there has ended the session.
        if first and without_hash(found.loaded()) != without_hash(first):
            webui.set_options(sd_model_checkpoint=first)


@pytest.fixture
def sd15(models: Models) -> Iterator[Models]:
    """The models, with the ordinary SD 1.5 checkpoint loaded before and after the test."""
    models.use("sd15")
    yield models
    models.use("sd15")


@pytest.fixture(scope="module")
def first_picture(webui: WebUI, models: Models) -> None:
    """Makes one image before the tests of a file, since some WebUIs load the checkpoint only then."""
    models.use("sd15")
    webui.txt2img()


@pytest.fixture(scope="session")
def browser(webui: WebUI, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A Chromium with a new, empty profile, which is closed before the WebUI is stopped. Without Chromium, the tests
    are skipped."""
    chromium = shutil.which("chromium")
    chromedriver = shutil.which("chromedriver")
    if not chromium or not chromedriver:
        missing = "chromium" if not chromium else "chromedriver"
        pytest.skip(f"there is no {missing} on this machine")
    from webui_browser import Browser

    profile: Path = tmp_path_factory.mktemp("profile")
    opened = Browser(chromium, chromedriver, str(profile))
    yield opened
    opened.quit()
    shutil.rmtree(profile, ignore_errors=True)


@pytest.fixture
def opened(
    request: pytest.FixtureRequest, browser: Any, webui: WebUI, sd15: Models, first_picture: None
) -> Any:
    """The browser, with the WebUI's page as the previous test of this file has left it, because opening a page takes as
    long as most tests. After a test that failed, the page is opened anew."""
    browser.reuse(webui.url, (request.module.__name__, request.session.testsfailed))
    return browser

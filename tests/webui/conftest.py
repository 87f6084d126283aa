"""Black-box tests of a WebUI with the extension: the standalone host, or with --webui URL any that is running."""
from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from webui_client import WebUI
from webui_process import HostProcess


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--webui", metavar="URL", help="test the WebUI at this address, not the standalone host")


@pytest.fixture(scope="session")
def webui(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebUI]:
    """The WebUI under test."""
    url = request.config.getoption("--webui", default=None)
    if url:
        yield WebUI(url, is_standalone=False)
        return
    host = HostProcess("--port", "0", "--data-dir", str(tmp_path_factory.mktemp("data")))
    yield WebUI(host.url(), is_standalone=True)
    host.stop()
    assert "Traceback" not in host.output, host.output


@pytest.fixture
def standalone(webui: WebUI) -> WebUI:
    """The WebUI under test where only the standalone host promises what is tested."""
    if not webui.is_standalone:
        pytest.skip("promised by the standalone host only")
    return webui


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A browser with a new, empty profile."""
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not chromedriver:
        missing = "chromium" if not chromium else "chromedriver"
        pytest.skip(f"there is no {missing} on this machine")
    from webui_browser import Browser

    profile: Path = tmp_path_factory.mktemp("profile")
    opened = Browser(chromium, chromedriver, str(profile))
    yield opened
    opened.quit()
    shutil.rmtree(profile, ignore_errors=True)

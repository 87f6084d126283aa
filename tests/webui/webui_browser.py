"""Chromium without a screen, kept to this machine."""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--window-size=1500,1200",
)
SECONDS_FOR_A_PICTURE = 120


class Browser:
    """A page of a WebUI, by the ids of its elements."""

    def __init__(self, chromium: str, chromedriver: str, profile: str) -> None:
        options = Options()
        options.binary_location = chromium
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(chromedriver))

    def open(self, url: str) -> None:
        self.driver.get(url)
        self.wait(lambda: self.driver.find_elements(By.ID, "txt2img_generate"), "the Generate button", 60)
        time.sleep(1)

    def text(self, elem_id: str) -> str:
        return self.driver.find_element(By.ID, elem_id).text

    def click(self, elem_id: str) -> None:
        self.driver.find_element(By.ID, elem_id).click()

    def choose_tab(self, title: str) -> None:
        tabs = self.driver.find_elements(By.CSS_SELECTOR, "#tabs > .tab-nav button, #tabs button[role=tab]")
        next(tab for tab in tabs if tab.text.strip() == title).click()

    def type(self, selector: str, value: Any) -> None:
        """Put a value into an input as typing does."""
        self.driver.execute_script(
            "const field = document.querySelector(arguments[0]); field.value = arguments[1];"
            "for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind, {bubbles: true}));",
            selector, str(value),
        )

    def wait(self, condition: Callable[[], Any], what: str, seconds: float = SECONDS_FOR_A_PICTURE) -> Any:
        """Wait until condition() is true and return its value. AssertionError naming what was awaited otherwise."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            value = condition()
            if value:
                return value
            time.sleep(0.2)
        raise AssertionError(f"waited {seconds:g} s in vain for {what}")

    def wait_for_text(self, elem_id: str, part: str, seconds: float = SECONDS_FOR_A_PICTURE) -> str:
        self.wait(lambda: part in self.text(elem_id), f"{part!r} in #{elem_id}", seconds)
        return self.text(elem_id)

    def pictures(self, gallery_id: str) -> list[str]:
        """The addresses of the pictures in a gallery."""
        images = self.driver.find_elements(By.CSS_SELECTOR, f"#{gallery_id} img")
        return [image.get_attribute("src") for image in images]

    def quit(self) -> None:
        self.driver.quit()

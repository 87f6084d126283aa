"""Headless Chromium that can reach this machine only."""
from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from busy import attempts, until
from selenium import webdriver
from selenium.common.exceptions import (
    ElementClickInterceptedException,
    ElementNotInteractableException,
    StaleElementReferenceException,
)
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--window-size=1500,1200",
)
SECONDS_FOR_A_PICTURE = 300
# The time limit of one command to the browser, which may be drawing a whole page on a busy machine.
SECONDS_FOR_A_COMMAND = 900
# Switches off animations: each would be drawn 60 times a second, by the CPU cores that the tests share.
NOTHING_MOVES = """
document.addEventListener("DOMContentLoaded", () => {
    const sheet = document.createElement("style");
    sheet.textContent = "*, ::before, ::after { animation: none !important; transition: none !important; }";
    document.head.append(sheet);
});
"""
# Counts the page's requests that the server has not answered. A test may set beforeAnswer to delay answers; replacing
# fetch later would have no effect, because gradio keeps the one that it finds when it loads.
WATCH_REQUESTS = """
const fetched = window.fetch;
window.requestsInProgress = 0;
window.beforeAnswer = async () => {};
window.fetch = async (...request) => {
    window.requestsInProgress++;
    try {
        const answer = await fetched(...request);
        await window.beforeAnswer(answer);
        return answer;
    } finally { window.requestsInProgress--; }
};
"""
FILL = """
const [values, again] = arguments;
for (const [selector, value] of Object.entries(values)) {
  const field = document.querySelector(selector);
  if (field.value === value && !again) continue;
  field.value = value;
  for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind, {bubbles: true}));
}
"""
TEXT = """
const at = document.getElementById(arguments[0]);
const seen = at.checkVisibility({visibilityProperty: true, opacityProperty: true});
return seen ? at.innerText.replace(/[\\t\u00a0]/g, ' ').replace(/\\s*\\n\\s*/g, '\\n').trim() : '';
"""
STICKING_OUT = """
const root = document.getElementById(arguments[0]);
const frame = root.getBoundingClientRect();
const left = Math.max(frame.left, 0) - 1, right = Math.min(frame.right, innerWidth) + 1;
const scrolls = element => {
  for (let at = element.parentElement; at && at !== root.parentElement; at = at.parentElement)
    if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(at).overflowX)) {
      const box = at.getBoundingClientRect();
      return box.left >= left && box.right <= right && getComputedStyle(at).overflowX !== 'hidden';
    }
  return false;
};
return [root, ...root.querySelectorAll('*')].filter(element => {
  const box = element.getBoundingClientRect();
  const seen = box.width > 0 && box.height > 0 && getComputedStyle(element).visibility !== 'hidden';
  return seen && (box.left < left || box.right > right) && !scrolls(element);
}).map(element => `${element.tagName} ${element.id || element.className}`.slice(0, 80));
"""


class Browser:
    """A page of a WebUI, whose elements are found by their ids."""

    def __init__(self, chromium: str, chromedriver: str, profile: str) -> None:
        options = Options()
        options.binary_location = chromium
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(chromedriver))
        self.driver.set_script_timeout(SECONDS_FOR_A_COMMAND)
        self.driver.set_page_load_timeout(SECONDS_FOR_A_COMMAND)
        config = getattr(self.driver.command_executor, "client_config", None)
        # Older selenium waits for a command for as long as it takes.
        if config is not None:
            config.timeout = SECONDS_FOR_A_COMMAND
        for source in (WATCH_REQUESTS, NOTHING_MOVES):
            self.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": source})
        # The browser tells the driver of every request, for its log.
        self.watch_network(False)
        self._user: Any = None

    def watch_network(self, on: bool) -> None:
        """Switch on or off whether the driver's performance log has the page's requests."""
        self.driver.execute_cdp_cmd(f"Network.{'enable' if on else 'disable'}", {})

    def open(self, url: str) -> None:
        self._user = None
        self.driver.get(url)
        self._wait_until_open()

    def refresh(self) -> None:
        self.driver.refresh()
        self._wait_until_open()

    def _wait_until_open(self) -> None:
        self.wait(lambda: self.driver.find_elements(By.ID, "txt2img_generate"), "the Generate button", 60)
        if self.driver.title != "OneDiff":
            # A1111's and Forge's scripts still move parts of the page about then.
            time.sleep(4)
        self.wait_for_answers()

    def reuse(self, url: str, user: Any) -> None:
        """Show the page as this user has left it, scrolled to the top, if the user equals the last one; otherwise open
        it anew."""
        # Some hosts add a theme to the address.
        if user != self._user or self.driver.current_url.partition("?")[0].rstrip("/") != url:
            self.open(url)
            self._user = user
        self.run("scrollTo(0, 0)")

    def wait_for_answers(self) -> None:
        """Wait until the page has had no open request for a moment and the same number of elements as before: it fills
        its fields while it loads, and would overwrite earlier input. Gives up after a while, since a page may repeat
        requests."""
        quiet = 0
        elements = -1
        for _ in attempts(10, 0.1, least=30):
            before = elements
            waiting, elements = self.run(
                "return [window.requestsInProgress, document.getElementsByTagName('*').length]"
            )
            quiet = 0 if waiting or elements != before else quiet + 1
            if quiet == 3:
                return

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def there(self, elem_id: str) -> bool:
        return bool(self.driver.find_elements(By.ID, elem_id))

    def find(self, selector: str) -> Any:
        """The element, scrolled into view."""
        element = self.driver.find_element(By.CSS_SELECTOR, selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        return element

    def open_accordion(self, elem_id: str) -> None:
        """Unfold an accordion of either gradio version, unless it is open."""
        self._fold(elem_id, True)

    def close_accordion(self, elem_id: str) -> None:
        self._fold(elem_id, False)

    def _fold(self, elem_id: str, wanted: bool) -> None:
        label = self.find(f"#{elem_id} .label-wrap")
        is_open = lambda: "open" in label.get_attribute("class").split()  # noqa: E731
        if is_open() is not wanted:
            label.click()
            self.wait(lambda: is_open() is wanted, f"open: {wanted}", 10)

    def size_page(self, width: int, height: int = 1000) -> None:
        """Give the page another size, such as a phone's; forget_size undoes it."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def forget_size(self) -> None:
        self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    def sticking_out(self, elem_id: str) -> list[str]:
        """The elements in the element with this id, or that one itself, that reach beyond its sides or those of the
        page, except within boxes that scroll."""
        return self.run(STICKING_OUT, elem_id)

    def text(self, elem_id: str) -> str:
        """The visible text of an element, with a line for each block. WebDriver's own function takes five times as
        long."""
        return self.run(TEXT, elem_id)

    def click(self, elem_id: str) -> None:
        def clicked() -> bool:
            # A list that closes, or a message that goes, lies over it for a moment.
            with contextlib.suppress(ElementClickInterceptedException):
                self.driver.find_element(By.ID, elem_id).click()
                return True
            return False

        self.wait(clicked, f"a {elem_id} that nothing lies over", 20)

    def point_at(self, elem_id: str) -> None:
        """Move the pointer onto an element, and wait until the page is drawn with it."""
        ActionChains(self.driver).move_to_element(self.driver.find_element(By.ID, elem_id)).perform()
        self.draw()

    def draw(self) -> None:
        """Wait until the page is drawn in its current state: at the second of two frames, the first is on the
        screen."""
        self.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")

    def choose_tab(self, title: str) -> None:
        def find() -> Any:
            tabs = "#tabs > .tab-nav button, #tabs button[role=tab], #tabs > .tab-wrapper .overflow-dropdown button"
            found = self.driver.find_elements(By.CSS_SELECTOR, tabs)
            return next((tab for tab in found if tab.text.strip().lower() == title.lower()), None)

        def unfold() -> None:
            """Open the menu into which gradio 6 moves tabs that have no room."""
            for menu in self.driver.find_elements(By.CSS_SELECTOR, "#tabs > .tab-wrapper .overflow-menu > button"):
                if menu.is_displayed():
                    menu.click()

        def clicked() -> bool:
            tab = find()
            if tab is None:
                return bool(unfold())
            try:
                tab.click()
            except (ElementNotInteractableException, StaleElementReferenceException):
                # Between finding it and clicking, gradio 6 may have folded the tab away or redrawn it.
                return bool(unfold())
            return True

        self.wait(clicked, f"the tab {title}", 10)

    def type(self, selector: str, value: Any) -> None:
        """Put a value into an input, with the events that typing causes."""
        self.fill({selector: value}, again=True)

    def fill(self, values: dict[str, Any], again: bool = False) -> None:
        """Put values into several inputs, by their selectors. again: also into those that already have their value."""
        self.run(FILL, {selector: str(value) for selector, value in values.items()}, again)

    def wait(self, condition: Callable[[], Any], what: str, seconds: float = SECONDS_FOR_A_PICTURE) -> Any:
        """Wait until condition() is true and return its value. Raises AssertionError that names what was awaited.

        seconds: on an idle machine.
        """
        return until(condition, what, seconds, 0.1)

    def wait_for_text(self, elem_id: str, part: str, seconds: float = SECONDS_FOR_A_PICTURE) -> str:
        says = ""

        def there() -> bool:
            nonlocal says
            says = self.text(elem_id)
            return part in says

        try:
            self.wait(there, f"{part!r} in #{elem_id}", seconds)
        except AssertionError as in_vain:
            seen = self.run("return document.getElementById(arguments[0]).checkVisibility()", elem_id)
            raise AssertionError(f"{in_vain}, which says {says!r}, {'to be seen' if seen else 'unseen'}") from None
        return says

    def pictures(self, gallery_id: str) -> list[str]:
        """The URLs of the images in a gallery."""
        images = self.driver.find_elements(By.CSS_SELECTOR, f"#{gallery_id} img")
        return [image.get_attribute("src") for image in images]

    def quit(self) -> None:
        self.driver.quit()

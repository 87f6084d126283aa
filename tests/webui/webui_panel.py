"""The Cache page of the OneDiff tab, as a user sees and uses it. Elements are given by their ids without "onediff_"."""
from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from busy import patience
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.support.expected_conditions import alert_is_present
from webui_client import WebUI
from webui_page import show_inner_page

TABLE = "#onediff_cache_table"
ROWS = f"return [...document.querySelectorAll('{TABLE} .onediff-table > table > tbody')]"
SECONDS_TO_WARM = 240
SECONDS_TO_TELL = 30
SECONDS_FOR_A_LIST = 5


class Panel:
    """The Cache page of an open page."""

    def __init__(self, page: Any) -> None:
        self.page = page

    def show(self) -> None:
        show_inner_page(self.page, "Cache")
        self.page.wait(lambda: self.page.text("onediff_cache_totals"), "the totals", 20)

    def start_over(self, tidy: Callable[[], None]) -> None:
        """Show the page with nothing selected, after tidy() has set the server's state.

        Messages and jobs of earlier tests are gone.
        """
        self.show()
        self.page.wait(lambda: not self.jobs("queued") and not self.jobs("running"), "the end of the queue", 60)
        self.select()
        self.page.run(f"for (const at of document.querySelectorAll('{TABLE} details[open]')) at.open = false")
        tidy()
        self.prewarm("")
        self.wait_for_message("Type at least one size", "cache_result")

    def click(self, name: str) -> None:
        self.page.wait(lambda: self.enabled(name), f"a {name} that can be clicked", 20)
        self.click_at(f"#onediff_{name}")

    def enabled(self, *names: str) -> bool:
        return self.page.run(
            "return [...arguments].every(name => !document.getElementById(`onediff_${name}`).disabled)", *names
        )

    def click_at(self, selector: str) -> None:
        """Click an element that may be redrawn at any moment, or appear a moment later."""

        def clicked() -> bool:
            with contextlib.suppress(NoSuchElementException, StaleElementReferenceException):
                self.page.find(selector).click()
                return True
            return False

        self.page.wait(clicked, f"a {selector} that can be clicked", 20)

    def texts(self, selector: str) -> list[str]:
        """The texts of elements, each on one line."""
        return self.page.run(
            "return [...document.querySelectorAll(arguments[0])].map(at => at.innerText.trim().replace(/\\s+/g, ' '))",
            selector,
        )

    def text(self, name: str) -> str:
        return self.page.text(f"onediff_{name}")

    def wait_for_message(self, part: str, where: str = "cache_outcome", seconds: float = SECONDS_TO_TELL) -> str:
        return self.page.wait_for_text(f"onediff_{where}", part, seconds)

    # --- the table ------------------------------------------------------------------------------------------------

    def rows(self) -> dict[str, str]:
        """The texts of the rows, in their order, by resolution."""
        return dict(self.page.run(
            f"{ROWS}.map(body => [body.querySelector('th').firstChild.textContent.trim(), body.rows[0].innerText])"
        ))

    def wait_for_rows(self, *resolutions: str) -> None:
        try:
            self.page.wait(lambda: set(self.rows()) == set(resolutions), f"the rows {resolutions}", SECONDS_TO_TELL)
        except AssertionError as in_vain:
            raise AssertionError(f"{in_vain}, but there are {self.rows()}") from None

    def wait_until_ready(self, *resolutions: str) -> None:
        def ready() -> bool:
            rows = self.rows()
            return all({"checked", "ready"} & set(rows.get(resolution, "").split()) for resolution in resolutions)

        self.page.wait(ready, f"{' and '.join(resolutions)} in the table, ready", SECONDS_TO_WARM)

    def select(self, *resolutions: str) -> None:
        """Select these rows, and no others."""
        for key in self.keys():
            if (key in self.keys(":checked")) != (key.split(" ")[0] in resolutions):
                self.click_at(f'{TABLE} tbody input[value="{key}"]')

    def selected(self) -> list[str]:
        return [key.split(" ")[0] for key in self.keys(":checked")]

    def keys(self, which: str = "") -> list[str]:
        """The page's keys of the rows. which: a pseudo-class of their checkboxes."""
        return self.page.run(
            "return [...document.querySelectorAll(arguments[0])].map(box => box.value)", f"{TABLE} tbody input{which}"
        )

    def choose(self, name: str, choice: str) -> None:
        """Choose from a list of any gradio version, once no other list is closing."""
        lists = "return document.querySelectorAll(':is(ul.options, ul[role=listbox])').length"
        self.page.wait(lambda: self.page.run(lists) == 0, "the end of other lists", 10)
        self.open_list(name)
        opened = time.monotonic()

        def chosen() -> bool:
            # It may be drawn anew at any moment.
            with contextlib.suppress(StaleElementReferenceException):
                for option in self.page.driver.find_elements("css selector", ":is(ul.options, ul[role=listbox]) li"):
                    if choice in option.text.split("\n")[-1]:
                        option.click()
                        return True
            nonlocal opened
            if time.monotonic() - opened > SECONDS_FOR_A_LIST * patience():
                # Seen twice on very busy machines, with an unknown cause: the choice never appeared.
                self.open_list(name)
                opened = time.monotonic()
            return False

        self.page.wait(chosen, f"the list's choice {choice!r}", 30)

    def open_list(self, name: str) -> None:
        field = self.page.find(f"#onediff_{name} input")
        # The list opens when its field gets the focus, not while the field has it.
        self.page.run("arguments[0].blur()", field)
        field.click()

    # --- the queue ------------------------------------------------------------------------------------------------

    def prewarm(self, sizes: str) -> None:
        self.page.type("#onediff_prewarm_sizes :is(textarea, input)", sizes)
        self.click("prewarm")

    def jobs(self, state: str = "") -> list[str]:
        """The lines of pre-warm jobs in the list. state: only those in this state, for example "queued"."""
        return self.texts(f"#onediff_cache_jobs .onediff-job{state and '-'}{state}[data-onediff-kind=prewarm]")

    # --- purging ---------------------------------------------------------------------------------------------------

    def purge(self, button: str, question: str, told: str) -> None:
        """Purge and confirm. question: a part of the question before the purge. told: a part of the message after
        it."""
        self.click(button)
        self.answer(question)
        self.wait_for_message(told)

    def answer(self, question: str, confirm: bool = True) -> None:
        """Answer the browser's question."""
        asked = self.page.wait(lambda: alert_is_present()(self.page.driver), "the browser's question", SECONDS_TO_TELL)
        assert question in asked.text
        asked.accept() if confirm else asked.dismiss()


def served(webui: WebUI) -> int:
    """The number of UNet calls that OneDiff has computed since the start."""
    calls = webui.calls()
    return calls["plain"] + calls["graph"]

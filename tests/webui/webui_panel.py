"""The OneDiff tab as a user sees and uses it."""
from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from selenium.common.exceptions import StaleElementReferenceException
from webui_client import WebUI
from webui_page import TAB, TAB_TITLE, show_inner_page

SIZES, BATCH, TOKENS, PREWARM, CANCEL = (
    f"onediff_{name}" for name in ("prewarm_sizes", "prewarm_batch", "tokens", "prewarm", "prewarm_cancel")
)
RESULT, JOBS, TABLE, TOTALS, CHART, OUTCOME, QUESTION = (
    f"onediff_cache_{name}" for name in ("result", "jobs", "table", "totals", "chart", "outcome", "question")
)
PIN, UNPIN, RELEASE, CONFIRM, KEEP, MODEL, ORDER, LENGTH = (
    f"onediff_{name}" for name in ("pin", "unpin", "release", "purge_confirm", "purge_keep", "model", "order", "tokens")
)
PURGE, PURGE_MODEL, PURGE_ALL, PURGE_DISK = (
    f"onediff_purge{name}" for name in ("", "_model", "_all", "_disk")
)
ROWS = f"return [...document.querySelectorAll('#{TABLE} .onediff-table > table > tbody')]"
SECONDS_TO_WARM = 240
SECONDS_TO_TELL = 30
SECONDS_FOR_A_LIST = 5
TRIES = 20


class Panel:
    """The OneDiff tab of an open page."""

    def __init__(self, page: Any) -> None:
        self.page = page

    def show(self) -> None:
        self.page.choose_tab(TAB_TITLE)
        self.page.wait(lambda: self.page.driver.find_element("id", TAB).is_displayed(), "the OneDiff tab", 20)
        self.page.wait(lambda: self.page.text(TOTALS), "what is so now", 20)

    def start_over(self, tidy: Callable[[], None]) -> None:
        """Show the Cache page with nothing chosen, and what is so when tidy() has brought the server into a state.

        RESULT, OUTCOME and the queue are those of this, and no earlier test's.
        """
        show_inner_page(self.page, "Cache")
        self.page.wait(lambda: self.page.text(TOTALS), "what is so now", 20)
        self.page.wait(lambda: not self.jobs("queued") and not self.jobs("running"), "the end of the queue", 60)
        self.select()
        self.page.run(f"for (const at of document.querySelectorAll('#{TABLE} details[open]')) at.open = false")
        if self.page.find(f"#{KEEP}").is_displayed():
            self.click(KEEP)
        for elem_id, first in ((MODEL, "All models"), (ORDER, "Last used"), (LENGTH, "77")):
            if first not in self.page.run("return document.querySelector(arguments[0]).value", f"#{elem_id} input"):
                self.choose(elem_id, first)
        self.page.type(f"#{BATCH} input", 1)
        tidy()
        self.prewarm("")
        self.told("Type at least one size", RESULT)

    def click(self, elem_id: str) -> None:
        self.page.wait(lambda: self.enabled(elem_id), f"a {elem_id} that can be clicked", 20)
        self.click_at(f"#{elem_id}")

    def enabled(self, *elem_ids: str) -> bool:
        return self.page.run(
            "return [...arguments].every(id => !document.getElementById(id).disabled)", *elem_ids
        )

    def click_at(self, selector: str) -> None:
        """Click something that may be drawn anew at any moment."""
        for _ in range(TRIES):
            with contextlib.suppress(StaleElementReferenceException):
                self.page.find(selector).click()
                return
        raise AssertionError(f"{selector} is drawn anew all the time")

    def texts(self, selector: str) -> list[str]:
        """What elements say, on one line each."""
        return self.page.run(
            "return [...document.querySelectorAll(arguments[0])].map(at => at.innerText.trim().replace(/\\s+/g, ' '))",
            selector,
        )

    def told(self, part: str, where: str = OUTCOME, seconds: float = SECONDS_TO_TELL) -> str:
        return self.page.wait_for_text(where, part, seconds)

    # --- the table ------------------------------------------------------------------------------------------------

    def rows(self) -> dict[str, str]:
        """Resolution to the text of its row, in the order in which they stand."""
        return dict(self.page.run(
            f"{ROWS}.map(body => [body.querySelector('th').firstChild.textContent.trim(), body.rows[0].innerText])"
        ))

    def wait_for_rows(self, *resolutions: str, seconds: float = SECONDS_TO_TELL) -> None:
        try:
            self.page.wait(lambda: set(self.rows()) == set(resolutions), f"the rows {resolutions}", seconds)
        except AssertionError as in_vain:
            raise AssertionError(f"{in_vain}, but there are {self.rows()}") from None

    def wait_until_ready(self, *resolutions: str) -> None:
        def ready() -> bool:
            rows = self.rows()
            return all({"checked", "ready"} & set(rows.get(resolution, "").split()) for resolution in resolutions)

        self.page.wait(ready, f"{' and '.join(resolutions)} in the table, ready", SECONDS_TO_WARM)

    def select(self, *resolutions: str) -> None:
        """Tick these rows, and no others."""
        for key in self.keys():
            if (key in self.keys(":checked")) != (key.split(" ")[0] in resolutions):
                self.click_at(f'#{TABLE} tbody input[value="{key}"]')

    def selected(self) -> list[str]:
        return [key.split(" ")[0] for key in self.keys(":checked")]

    def keys(self, which: str = "") -> list[str]:
        """What the page calls its rows. which: a pseudo-class of their boxes."""
        return self.page.run(
            "return [...document.querySelectorAll(arguments[0])].map(box => box.value)", f"#{TABLE} tbody input{which}"
        )

    def choose(self, elem_id: str, choice: str) -> None:
        """Choose from a list of either gradio version."""
        self.open_list(elem_id)
        opened = time.monotonic()
        options = f"#{elem_id} ul.options li, ul.options li"

        def chosen() -> bool:
            try:
                for option in self.page.driver.find_elements("css selector", options):
                    if choice in option.text.split("\n")[-1]:
                        option.click()
                        return True
            except StaleElementReferenceException:
                # Another list was still closing, or this one is drawn anew.
                pass
            nonlocal opened
            if time.monotonic() - opened > SECONDS_FOR_A_LIST:
                # Seen twice, on machines that were very busy: the choice never came. Why is not known.
                self.open_list(elem_id)
                opened = time.monotonic()
            return False

        self.page.wait(chosen, f"the list's choice {choice!r}", 30)

    def open_list(self, elem_id: str) -> None:
        field = self.page.find(f"#{elem_id} input")
        # It opens for who comes to it, and not for who is there.
        self.page.run("arguments[0].blur()", field)
        field.click()

    # --- the queue ------------------------------------------------------------------------------------------------

    def prewarm(self, sizes: str) -> None:
        self.page.type(f"#{SIZES} textarea, #{SIZES} input", sizes)
        self.click(PREWARM)

    def jobs(self, state: str = "") -> list[str]:
        """The lines of the queue. state: of these alone, such as "queued"."""
        return self.texts(f"#{JOBS} .onediff-job{state and '-'}{state}")

    def press(self, name: str, size: str) -> None:
        """Click a button of a job: Earlier, Later or Cancel."""
        self.click_at(f'#{JOBS} button[aria-label="{name}: {size}"]')

    # --- throwing away --------------------------------------------------------------------------------------------

    def purge(self, button: str, question: str, told: str) -> None:
        """Purge and confirm. question, told: parts of what is asked before, and said afterwards."""
        self.click(button)
        self.told(question, QUESTION)
        self.click(CONFIRM)
        self.told(told)


def served(webui: WebUI) -> int:
    """How many calls we have served so far."""
    calls = webui.calls()
    return calls["plain"] + calls["graph"]

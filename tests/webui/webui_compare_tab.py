"""The Compare and Consistency pages of the OneDiff tab as a user sees and uses them."""
from __future__ import annotations

from typing import Any

from webui_page import show_inner_page
from webui_panel import Panel

LEFT, RIGHT = "onediff_compare_left", "onediff_compare_right"
START, CANCEL, SAVE, COPY = (f"onediff_compare_{name}" for name in ("start", "cancel", "save", "copy"))
TOLD, IMAGES, NUMBERS = (f"onediff_compare_{name}" for name in ("told", "gallery", "numbers"))
FACTS, OTHER_FACTS, FACTS_COPY, COPIED, DIFFERENCES = (
    "onediff_facts", "onediff_other_facts", "onediff_facts_copy", "onediff_compare_copied",
    "onediff_compare_differences",
)
OFF, CURRENT = "Off: the WebUI's own", "Current settings"
SMALL = {"prompt": "a lighthouse at dusk", "width": 64, "height": 64, "steps": 3, "seed": 21}
SECONDS = 300


class Compare(Panel):
    """The Compare page of an open page."""

    def show(self, inner: str = "Compare") -> None:
        show_inner_page(self.page, inner)
        elem_id = {"Compare": START, "Consistency": FACTS_COPY}[inner]
        self.page.wait(lambda: self.page.driver.find_element("id", elem_id).is_displayed(), f"the page {inner}", 20)

    def start_over(self) -> None:
        """Show the page with what a new one has on its sides and in its fields; the last comparison stays."""
        self.show()
        for side, choice in ((LEFT, OFF), (RIGHT, CURRENT)):
            if self.page.run("return document.querySelector(arguments[0])?.value", f"#{side} input") != choice:
                self.choose(side, choice)
        self.ask(negative="", images=1, left_changes="", right_changes="")

    def choose(self, elem_id: str, choice: str) -> None:
        """Choose from a list when no other list is closing any more."""
        lists = "return document.querySelectorAll('ul.options').length"
        self.page.wait(lambda: self.page.run(lists) == 0, "the end of other lists", 10)
        super().choose(elem_id, choice)

    def ask(self, **values: Any) -> None:
        """Fill in the fields of a small image; values: other than in SMALL, left_changes and right_changes too."""
        self.page.fill({
            f"#onediff_compare_{name} :is(textarea, input)": value for name, value in {**SMALL, **values}.items()
        })

    def start(self, **values: Any) -> None:
        self.ask(**values)
        self.click(START)

    def made(self, **values: Any) -> str:
        """Compare and wait for the images; returns what the numbers say."""
        self.start(**values)
        self.told("%", TOLD)
        shown = f"return document.querySelector('#{SAVE}')?.offsetParent != null"
        self.page.wait(lambda: self.page.run(shown), "the end of the comparison", SECONDS)
        return self.page.wait_for_text(NUMBERS, "Verdict", 10)

    def images(self) -> list[str]:
        """The addresses of the images that are shown: of each seed left, right and difference."""
        selector = f"#{IMAGES} img"
        return self.page.run("return [...document.querySelectorAll(arguments[0])].map(image => image.src)", selector)

    def rows(self) -> list[list[str]]:
        """The table of numbers, a list of cells for each seed."""
        return self.page.run(
            f"return [...document.querySelectorAll('#{NUMBERS} [aria-label=\"How the images differ\"] tbody tr')].map("
            "row => [...row.cells].map(cell => cell.innerText.trim()))"
        )

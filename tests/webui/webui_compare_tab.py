"""The Compare page of the OneDiff tab, as a user sees and uses it."""
from __future__ import annotations

import contextlib
from typing import Any

from webui_client import WebUI
from webui_page import show_inner_page
from webui_panel import Panel

OFF = "Off: the WebUI's own"
CURRENT = "Current settings"
SMALL = {"prompt": "a lighthouse at dusk", "width": 64, "height": 64, "steps": 3, "cfg_scale": 7, "seed": 21}
SECONDS = 300
VIEWER = "[data-onediff-viewer]"
VIEW = f"const at = document.querySelector('{VIEWER}'); return at && at.checkVisibility() ? at.dataset.view : ''"
NAMES = f"""
return [...document.querySelectorAll('{VIEWER} [data-onediff-name]')]
  .filter(at => at.checkVisibility({{visibilityProperty: true}})).map(at => at.innerText);
"""
LOADED = "const at = document.querySelector(arguments[0]); return at.complete && at.naturalWidth ? at.src : ''"
SPLIT = f"""
const frame = document.querySelector('{VIEWER} .onediff-frame'), range = frame.querySelector('input');
const box = frame.getBoundingClientRect(), line = frame.querySelector('.onediff-divider').getBoundingClientRect();
const drawn = 100 * ((line.left + line.right) / 2 - box.left) / box.width;
return [Number(range.value), Math.round(drawn), range.ariaValueText];
"""


class Compare(Panel):
    """Actions on the Compare page of the OneDiff tab, in a browser that shows the WebUI, and what that page shows."""

    def __init__(self, page: Any, webui: WebUI) -> None:
        super().__init__(page)
        self.webui = webui

    def show(self) -> None:
        show_inner_page(self.page, "Compare")
        start = self.page.driver.find_element
        self.page.wait(lambda: start("id", "onediff_compare_start").is_displayed(), "the Compare page", 20)

    def show_report(self) -> str:
        """Unfold the consistency report of this machine, wait for it, and return it. The page may lose text that is
        typed earlier."""
        self.show()
        self.page.open_accordion("onediff_facts_page")
        shown = "return document.querySelector('#onediff_facts textarea')?.value"
        return str(self.page.wait(lambda: self.page.run(shown), "this machine's report", 20))

    def compare_report(self, report: str, expected: str) -> str:
        """Paste another machine's report, and return the page's answer. expected: a part of the answer to wait for."""
        field = "#onediff_other_facts textarea"
        self.page.type(field, report)
        with contextlib.suppress(AssertionError):
            return self.wait_for_message(expected, "compare_differences", 5)
        # Seen on a busy machine, just after gradio had made the text box: no answer, for an unknown reason.
        self.page.type(field, "")
        self.page.type(field, report)
        return self.wait_for_message(expected, "compare_differences")

    def start_over(self) -> None:
        """Wait until no comparison runs, and show the page with the default sides and options. The last result
        stays."""
        self.show()
        self.wait_for_end()
        for side, choice in (("left", OFF), ("right", CURRENT)):
            field = f"return document.querySelector('#onediff_compare_{side} input').value"
            if self.page.run(field) != choice:
                self.choose(f"compare_{side}", choice)
        self.ask()

    def ask(self, left_changes: str = "", right_changes: str = "", images: int = 1, **values: object) -> None:
        """Fill in the page and the txt2img tab. values: fields of the txt2img tab that differ from SMALL."""
        own = {"left_changes": left_changes, "right_changes": right_changes, "images": images}
        self.page.fill({
            **{f"#onediff_compare_{name} :is(textarea, input)": value for name, value in own.items()},
            **{f"#txt2img_{name} :is(textarea, input[type=number])": at for name, at in {**SMALL, **values}.items()},
        })

    def start(self, **values: object) -> None:
        self.ask(**values)
        self.click("compare_start")

    def run_to_end(self, **values: object) -> str:
        """Start a comparison, wait for its end, and return the text of its numbers."""
        # The server's list, because a new page shows an empty one until its first answer comes.
        before = self.known()
        self.start(**values)
        (new,) = self.page.wait(lambda: self.known() - before, "the new comparison", 60)
        self.page.wait(lambda: str(new) in self.shown(), "the end of the comparison", SECONDS)
        return self.wait_for_message("Verdict", "compare_numbers", 10)

    def comparisons(self, state: str) -> list[str]:
        """The rows of the list of jobs with comparisons in this state."""
        return self.texts(f"#onediff_compare_jobs .onediff-job-{state}[data-onediff-kind=comparison]")

    def known(self) -> set[int]:
        """The ids of all comparisons in the server's list of jobs, in any state."""
        return {job["id"] for job in self.webui.get("/onediff/v1/jobs")["jobs"] if job["kind"] == "comparison"}

    def shown(self) -> set[str]:
        """The ids of the finished comparisons in the list of jobs."""
        found = "#onediff_compare_jobs .onediff-job-done [data-onediff-show]"
        return set(self.page.run(f"return [...document.querySelectorAll('{found}')].map(at => at.dataset.onediffShow)"))

    def wait_for_end(self) -> None:
        pending = lambda: self.comparisons("running") + self.comparisons("queued")  # noqa: E731
        self.page.wait(lambda: not pending(), "the end of what is compared", SECONDS)

    def click_job(self, name: str, what: str = "Cancel") -> None:
        """Click a button of a job. name: the job's. what: the button's."""
        self.click_at(f'#onediff_compare_jobs [aria-label="{what}: {name}"]')

    def images(self) -> list[str]:
        """The URLs of the page's images: left, right and difference of each seed."""
        return self.page.run(
            "return [...document.querySelectorAll('#onediff_compare_gallery img')].map(image => image.src)"
        )

    # --- the viewer -----------------------------------------------------------------------------------------------

    def view(self) -> str:
        """The viewer's view: "slider", "left", "right" or "difference"; "" while there is no image."""
        return self.page.run(VIEW)

    def choose_view(self, name: str) -> None:
        self.click_at(f"{VIEWER} [data-onediff-view={name}]")

    def choose_seed(self, seed: int) -> None:
        self.click_at(f"{VIEWER} [data-onediff-seed='{seed}']")

    def seeds(self) -> list[str]:
        """The texts of the buttons with which a seed is chosen."""
        return self.texts(f"{VIEWER} [data-onediff-seed]")

    def drawn(self, name: str) -> str:
        """The URL of the viewer's "left", "right" or "difference" image, once it is loaded."""
        selector = f"{VIEWER} img[data-onediff-image={name}]"
        return self.page.wait(lambda: self.page.run(LOADED, selector), f"the {name} image", 20)

    def names(self) -> list[str]:
        """The visible names of the sides above the image."""
        return self.page.run(NAMES)

    def split(self) -> tuple[float, float, str]:
        """The percentage of the frame that shows the left image, three times: the slider's value, the position of the
        divider, and the text for screen readers."""
        return tuple(self.page.run(SPLIT))

    def rows(self) -> list[list[str]]:
        """The cells of the table of seeds, a list for each seed."""
        return self.page.run(
            "return [...document.querySelectorAll('#onediff_compare_numbers [aria-label=\"How the images differ\"] "
            "tbody tr')].map(row => [...row.cells].map(cell => cell.innerText.trim()))"
        )

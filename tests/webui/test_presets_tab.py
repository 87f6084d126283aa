"""The Presets page of the OneDiff tab, used as a user does."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys
from webui_client import WebUI
from webui_page import show_inner_page, show_settings
from webui_panel import Panel

LIST, USE, TABLE, TOLD = "onediff_preset_chosen", "onediff_preset_use", "onediff_presets_table", "onediff_presets_told"
BALANCED = "on; deepcache_interval 3; deepcache_depth 3"


class Presets(Panel):
    """The Presets page of an open page."""

    def show(self) -> None:
        show_inner_page(self.page, "Presets")
        self.page.wait(lambda: len(self.rows()) == 4, "the presets", 20)

    def rows(self) -> dict[str, str]:
        """Name to the rest of its row."""
        return dict(self.page.run(
            f"return [...document.querySelectorAll('#{TABLE} tbody tr')]"
            ".map(row => [row.cells[0].firstChild.textContent.trim(), row.innerText])"
        ))

    def in_force(self) -> list[str]:
        return [name for name, row in self.rows().items() if "in force" in row]

    def use(self, name: str) -> str:
        self.choose(LIST, name)
        self.click(USE)
        return self.told(f"The settings are those of '{name}' now", TOLD)


@pytest.fixture
def presets(opened: Any, webui: WebUI) -> Iterator[Presets]:
    """The page, with every option of a preset at its default, now and afterwards."""
    standing = {
        "onediff_deepcache_interval": 1, "onediff_deepcache_depth": 1,
        "onediff_low_bit": "off", "onediff_vae_precision": "auto", "onediff_matmul_accumulation": "full",
    }
    webui.set_options(**standing)
    opened.open(webui.url)  # The settings tab shows what was so when the page was opened.
    shown = Presets(opened)
    shown.show()
    yield shown
    webui.set_options(**standing)


def run_says(webui: WebUI) -> str:
    """What a run of another client is made with."""
    return webui.txt2img().info["infotexts"][0].partition("OneDiff: ")[2].partition(",")[0].strip()


def shown_in_settings(page: Any, name: str) -> str:
    """What the settings tab shows of a number or a choice."""
    return page.run(
        "const at = document.getElementById(arguments[0]); const radio = at.querySelector('input[type=radio]:checked');"
        "return (radio || at.querySelector('input[type=number], textarea, input')).value", f"setting_onediff_{name}",
    )


def test_use_these_settings(presets: Presets, webui: WebUI) -> None:
    """They hold for every picture, and the settings tab, open all the while, shows them and keeps them when applied."""
    page = presets.page
    assert list(presets.rows()) == ["Exact", "Balanced", "Fast", "Draft"] and presets.in_force() == ["Exact"]
    assert "deepcache_interval 3" in presets.rows()["Balanced"] and "0.46 s an image" in presets.rows()["Balanced"]
    assert "Changed: DeepCache interval, DeepCache depth." in presets.use("Balanced")
    assert presets.in_force() == ["Balanced"] and run_says(webui) == BALANCED
    assert shown_in_settings(page, "deepcache_interval") == "3"
    presets.use("Fast")
    assert (shown_in_settings(page, "vae_precision"), shown_in_settings(page, "low_bit")) == ("fp16", "int8")
    show_settings(page)
    page.find("#settings_submit").click()
    page.wait_for_text("settings_result", "settings changed", 20) if not webui.is_standalone else page.wait_for_text(
        "settings_result", "No setting changed", 20)
    assert "low_bit int8" in run_says(webui)
    presets.show()
    presets.choose(LIST, "Exact")
    page.driver.switch_to.active_element.send_keys(Keys.TAB)
    assert page.driver.switch_to.active_element.get_attribute("id") == USE
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    presets.told("The settings are those of 'Exact' now", TOLD)
    assert run_says(webui) == "on"

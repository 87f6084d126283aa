"""The documentation says what the code says, and leads where it says."""
from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from lib_onediff.core.settings import Settings, allowed_values, format_value
from lib_onediff.core.version import __version__
from lib_onediff.ui.presets import EXACT, PRESETS

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = sorted((ROOT / ".readme").glob("*.md"))
EVERYTHING = [README, *sorted((ROOT / "lib_onediff").rglob("README.md")), *PAGES]
OPTIONS = ROOT / ".readme" / "speed-and-quality.md"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors_of(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links_of(page: Path) -> list[str]:
    """Where it leads within the repository."""
    text = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith(("http://", "https://"))]


def pages_that_readers_reach() -> set[Path]:
    found = set()
    waiting = [README]
    while waiting:
        page = waiting.pop()
        if page not in found and page.suffix == ".md":
            found.add(page)
            waiting += [(page.parent / link.partition("#")[0]).resolve() for link in links_of(page) if link[0] != "#"]
    return found


def test_the_documented_table_of_options_is_generated_from_settings() -> None:
    """Except for links in it."""
    found = re.findall(r"^\| .* \(`\w+`\) \|.*$", text_of(OPTIONS), re.MULTILINE)
    assert [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", row) for row in found] == [
        f"| {about['label']} (`{option.name}`) | {allowed_values(option)} | {format_value(option.default)} | "
        f"{about['explanation']} |" for option in fields(Settings) for about in [option.metadata]
    ]


@pytest.mark.parametrize("page", EVERYTHING, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_and_anchor_exists(page: Path) -> None:
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def test_every_page_is_linked_from_the_readme_and_every_file_from_somewhere() -> None:
    linked = {(README.parent / link.partition("#")[0]).resolve() for link in links_of(README)}
    assert set(PAGES) <= linked
    reached = {
        (page.parent / link.partition("#")[0]).resolve() for page in pages_that_readers_reach()
        for link in links_of(page)
    }
    assert set((ROOT / ".readme").iterdir()) <= reached


def test_the_latest_changes_are_those_of_this_version() -> None:
    assert f"\n{__version__}: " in text_of(README)
    headings = re.findall(r"^## (.*)$", text_of(ROOT / ".readme" / "changelog.md"), re.MULTILINE)
    assert headings[headings[0] == "Unreleased"] == __version__


def test_the_python_examples_of_the_documentation_compile() -> None:
    for page in EVERYTHING:
        blocks = re.findall(r"```python\n(.*?)```", text_of(page), flags=re.DOTALL)
        assert blocks or page != README
        for block in blocks:
            compile(block, page.name, "exec")


def test_the_documented_times_and_options_of_presets_are_those_of_the_code() -> None:
    page = text_of(OPTIONS)
    for preset in PRESETS.values():
        gain = f"{PRESETS[EXACT].seconds / preset.seconds:.1f}x"
        assert re.search(rf"^\| {preset.name} \|.*\| {preset.seconds:.2f} s \| {gain} ", page, re.M)
        assert all(f"`{name} {value}`" in page for name, value in preset.values.items())

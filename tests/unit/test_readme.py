"""The documentation agrees with the code, and its links lead to pages that exist."""
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
    """The anchors that GitHub makes for the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links_of(page: Path) -> list[str]:
    """The page's links within the repository, without those in code blocks."""
    text = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith(("http://", "https://"))]


def pages_that_readers_reach() -> set[Path]:
    """The README and all pages that links from it lead to, directly or by other pages."""
    found = set()
    waiting = [README]
    while waiting:
        page = waiting.pop()
        if page not in found and page.suffix == ".md":
            found.add(page)
            waiting += [(page.parent / link.partition("#")[0]).resolve() for link in links_of(page) if link[0] != "#"]
    return found


def test_the_table_of_options_in_speed_and_quality_equals_the_fields_of_settings() -> None:
    """Each row has the label, name, allowed values, default and explanation of a field of Settings. Links in the table
    are ignored."""
    found = re.findall(r"^\| .* \(`\w+`\) \|.*$", text_of(OPTIONS), re.MULTILINE)
    assert [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", row) for row in found] == [
        f"| {about['label']} (`{option.name}`) | {allowed_values(option)} | {format_value(option.default)} | "
        f"{about['explanation']} |" for option in fields(Settings) for about in [option.metadata]
    ]


@pytest.mark.parametrize("page", EVERYTHING, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file_and_an_anchor_that_exist(page: Path) -> None:
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def test_the_readme_links_every_page_and_some_page_links_every_file_of_the_documentation() -> None:
    """Pages are .readme/*.md; files are all that .readme has, images too."""
    linked = {(README.parent / link.partition("#")[0]).resolve() for link in links_of(README)}
    assert set(PAGES) <= linked
    reached = {
        (page.parent / link.partition("#")[0]).resolve() for page in pages_that_readers_reach()
        for link in links_of(page)
    }
    assert set((ROOT / ".readme").iterdir()) <= reached


def test_the_readme_and_the_changelog_have_the_changes_of_this_version() -> None:
    """In changelog.md, this version is the first heading, or the second one after "Unreleased"."""
    assert f"\n{__version__}: " in text_of(README)
    headings = re.findall(r"^## (.*)$", text_of(ROOT / ".readme" / "changelog.md"), re.MULTILINE)
    assert headings[headings[0] == "Unreleased"] == __version__


def test_the_python_examples_of_the_documentation_compile() -> None:
    for page in EVERYTHING:
        blocks = re.findall(r"```python\n(.*?)```", text_of(page), flags=re.DOTALL)
        assert blocks or page != README
        for block in blocks:
            compile(block, page.name, "exec")


def test_the_documented_times_and_options_of_presets_equal_those_in_the_code() -> None:
    """Each preset has a row in speed-and-quality.md with its seconds and its speedup over Exact."""
    page = text_of(OPTIONS)
    for preset in PRESETS.values():
        gain = f"{PRESETS[EXACT].seconds / preset.seconds:.1f}x"
        assert re.search(rf"^\| {preset.name} \|.*\| {preset.seconds:.2f} s \| {gain} ", page, re.M)
        assert all(f"`{name} {value}`" in page for name, value in preset.values.items())

"""scripts/onediff_not_loaded.py shows an accordion with the reason if OneDiff cannot be loaded, and
otherwise nothing."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio")

import gradio

from lib_onediff.demo.modules import modules_importable, scripts

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "onediff_not_loaded.py")


def load_script() -> Any:
    with modules_importable():
        return scripts.load_module(SCRIPT)


def test_the_page_shows_nothing_if_onediff_can_be_imported() -> None:
    script = load_script()
    assert script.reason is None and not hasattr(script, "OneDiffNotLoaded")


def test_the_page_shows_why_onediff_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of OneDiff raises when it is imported, as with a torch that is too old."""
    monkeypatch.delitem(sys.modules, "lib_onediff.ui.xyz", raising=False)
    monkeypatch.delattr("lib_onediff.ui.xyz", raising=False)
    monkeypatch.setitem(sys.modules, "lib_onediff.ui.xyz", None)
    script = load_script()
    assert "OneDiff could not be loaded, so images are made without it" in script.reason and "torch" in script.reason
    page = script.OneDiffNotLoaded()
    assert page.title() == "OneDiff" and page.show(False) is script.scripts.AlwaysVisible
    with gradio.Blocks() as blocks:
        assert page.ui(False) == []
    shown = [block.value for block in blocks.blocks.values() if isinstance(block, gradio.HTML)]
    assert len(shown) == 1 and "could not be loaded" in shown[0]

"""scripts/onediff_not_loaded.py: silent where OneDiff can be loaded, an accordion with the reason where it cannot."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio")

import gradio

from lib_onediff.demo.modules import modules_importable, scripts

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "onediff_not_loaded.py")


def loaded() -> Any:
    with modules_importable():
        return scripts.load_module(SCRIPT)


def test_nothing_is_said_where_all_can_be_imported() -> None:
    script = loaded()
    assert script.reason is None and not hasattr(script, "OneDiffNotLoaded")


def test_what_cannot_be_imported_is_told_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    # As an older torch has it: a module of ours raises when it is imported.
    monkeypatch.delitem(sys.modules, "lib_onediff.ui.xyz", raising=False)
    monkeypatch.delattr("lib_onediff.ui.xyz", raising=False)
    monkeypatch.setitem(sys.modules, "lib_onediff.ui.xyz", None)
    script = loaded()
    assert "OneDiff could not be loaded and changes nothing" in script.reason and "torch" in script.reason
    page = script.OneDiffNotLoaded()
    assert page.title() == "OneDiff" and page.show(False) is script.scripts.AlwaysVisible
    with gradio.Blocks() as blocks:
        assert page.ui(False) == []
    said = [block.value for block in blocks.blocks.values() if isinstance(block, gradio.HTML)]
    assert len(said) == 1 and "could not be loaded" in said[0]

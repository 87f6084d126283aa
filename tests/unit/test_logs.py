"""What a user reads on the console."""
from __future__ import annotations

import logging
from typing import Any

import pytest
from builders import a_call, served, shared_unet

import lib_onediff
from lib_onediff.core.logs import DEBUG_VARIABLE, show_on_console
from lib_onediff.runtime.call_stats import CallStats


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def start(debug: str | None = None) -> Any:
        if debug is None:
            monkeypatch.delenv(DEBUG_VARIABLE, raising=False)
        else:
            monkeypatch.setenv(DEBUG_VARIABLE, debug)
        show_on_console()
        return lambda: capsys.readouterr().err.splitlines()

    return start


def test_no_name_makes_lines_of_its_own_or_commands_the_console(console: Any) -> None:
    lines = console()
    logging.getLogger("onediff").warning("%s is loaded", "a\x1b[2J\nOneDiff: all is well\r\u202e.ckpt")
    assert lines() == ["OneDiff: a?[2J?OneDiff: all is well??.ckpt is loaded"]


def test_two_routes_that_take_turns_within_a_step_are_two_lines(console: Any) -> None:
    lines, call_stats = console(), CallStats()
    for _ in range(20):
        call_stats.note("plain", "")
        call_stats.note("host", "perturbed attention")
    assert len(lines()) == 2
    assert call_stats.calls == {"plain": 20, "host": 20}


def test_debug_tells_every_call_binding_and_its_time(console: Any) -> None:
    lines = console("1")
    unet = shared_unet("SD1")
    lib_onediff.compile_unet(unet)
    for _ in range(2):
        served(unet, a_call(unet))
    told = lines()
    lib_onediff.uncompile_unet(unet)
    assert sum("plain route" in line and "64x64, batch 2, 77 tokens" in line for line in told) == 2
    assert any("bound" in line and "MiB copied in" in line for line in told)
    assert all(line[2] == line[5] == ":" and line[8] == "." and "OneDiff: " in line for line in told), told

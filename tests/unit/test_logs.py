"""What a user reads on the console."""
from __future__ import annotations

import logging

import pytest

from lib_onediff.core.logs import DEBUG_VARIABLE, show_on_console
from lib_onediff.runtime.call_stats import CallStats
from lib_onediff.runtime.vae.route import decode_sentence


@pytest.fixture(autouse=True)
def no_details(monkeypatch: pytest.MonkeyPatch) -> None:
    """The console shows no details: the environment variable for them is not set."""
    monkeypatch.delenv(DEBUG_VARIABLE, raising=False)


def test_control_characters_in_a_name_are_replaced_on_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint's name could end the line, clear the screen, or reverse the text."""
    show_on_console()
    logging.getLogger("onediff").warning("%s is loaded", "a\x1b[2J\nOneDiff: all is well\r\u202e.ckpt")
    assert capsys.readouterr().err == "OneDiff: a?[2J?OneDiff: all is well??.ckpt is loaded\n"


def test_the_prefix_onediff_is_added_only_to_console_lines_that_do_not_begin_with_it(
    capsys: pytest.CaptureFixture[str]
) -> None:
    """The prefix is "OneDiff: ". A message may begin with "OneDiff" in another way, such as "OneDiff's output"."""
    show_on_console()
    for text in ("OneDiff: the driver is old", "OneDiff's output is used unchecked.", decode_sentence("ours", "")):
        logging.getLogger("onediff").info(text)
    shown = ["OneDiff: the driver is old", "OneDiff's output is used unchecked.", "OneDiff: VAE: accelerated"]
    assert capsys.readouterr().err.splitlines() == shown


def test_two_alternating_reasons_why_the_host_serves_are_logged_once_each(capsys: pytest.CaptureFixture[str]) -> None:
    """note_host() counts each of 40 calls that the host serves."""
    show_on_console()
    call_stats = CallStats()
    for _ in range(20):
        call_stats.note_host("perturbed attention")
        call_stats.note_host("freeu")
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert call_stats.calls == {"host": 40}

"""The attention that the user has chosen for the WebUI: a note says if OneDiff does not use it, and OneDiff's output is
not compared with one of reduced precision."""
from __future__ import annotations

from typing import Any

import pytest
from builders import relative_error
from contract_hosts import FAMILY, Host, calls_of

from lib_onediff.runtime.runtime import runtime

# An attention that computes the exact result times a factor.
SOURCE = """
def {name}(q, k, v, heads, mask=None, **others):
    return {exact}(q, k, {factor} * v, heads)
"""


def choose(host: Host, adapter: Any, name: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the WebUI's UNet compute attention by a function of this name in the WebUI's own module."""
    attention = adapter.networks[0].attention
    module = host.module(attention.functions)
    exec(SOURCE.format(name=name, exact="attention_pytorch", factor=factor), vars(module))
    monkeypatch.setattr(host.module(attention.caller), attention.name, getattr(module, name))


@pytest.mark.parametrize(("name", "called"), [
    ("attention_sage", "Sage attention"), ("attention_comfy_kitchen_int8", "Comfy kitchen int8 attention"),
    ("attention_of_next_year", "Of next year attention"),
])
@pytest.mark.parametrize("host", FAMILY, indirect=True)
def test_a_note_names_an_inexact_attention_and_our_output_is_not_verified_against_it(
    host: Host, name: str, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The WebUI's attention returns the exact result times 1.5: a comparison would fail, and the WebUI would compute
    the calls. OneDiff treats every attention that it does not know as inexact. name: the name of the attention's
    function. called: the attention's name in the note."""
    exact = host.generate()
    adapter = host.start()
    assert adapter.notes() == []
    choose(host, adapter, name, 1.5, monkeypatch)
    made, calls = calls_of(host.generate)
    assert calls == {"plain": 2}, runtime.status()["reason"]
    assert relative_error(made[0], exact[0]) < 1e-5
    assert [note.split(",")[0] for note in adapter.notes()] == [called]
    host.switch(False)
    assert relative_error(host.generate()[0], exact[0]) > 1e-3, "without OneDiff, the WebUI uses it again"


@pytest.mark.parametrize("host", FAMILY, indirect=True)
def test_our_output_is_verified_against_an_attention_that_is_known_as_exact(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OneDiff knows attention_basic as exact. Here it returns the exact result times 1.5, so the comparison fails, and
    the WebUI computes both calls."""
    adapter = host.start()
    choose(host, adapter, "attention_basic", 1.5, monkeypatch)
    made, calls = calls_of(host.generate)
    assert calls == {"host": 2} and "output differs too much from the one without OneDiff" in runtime.status()["reason"]
    assert adapter.notes() == []

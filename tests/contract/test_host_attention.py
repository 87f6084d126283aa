"""The attention that the user has chosen for the host: named where it is not used, and no yardstick where it rounds."""
from __future__ import annotations

from typing import Any

import pytest
from builders import relative_error
from contract_hosts import FAMILY, Host, calls_of

from lib_onediff.runtime.runtime import runtime

# The host's own, and one that is off by far more than rounding.
SOURCE = """
def {name}(q, k, v, heads, mask=None, **others):
    return {exact}(q, k, {factor} * v, heads)
"""


def choose(host: Host, adapter: Any, name: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the host's UNet compute attention by a function of its own of this name."""
    attention = adapter.networks[0].attention
    module = host.module(attention.functions)
    exec(SOURCE.format(name=name, exact="attention_pytorch", factor=factor), vars(module))
    monkeypatch.setattr(host.module(attention.caller), attention.name, getattr(module, name))


@pytest.mark.parametrize(("name", "called"), [
    ("attention_sage", "Sage attention"), ("attention_comfy_kitchen_int8", "Comfy kitchen int8 attention"),
    ("attention_of_next_year", "Of next year attention"),
])
@pytest.mark.parametrize("host", FAMILY, indirect=True)
def test_an_attention_that_is_not_known_to_be_exact_is_named_and_no_yardstick(
    host: Host, name: str, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = host.generate()
    adapter = host.start()
    assert adapter.notes() == []
    choose(host, adapter, name, 1.5, monkeypatch)
    made, calls = calls_of(host.generate)
    assert calls == {"plain": 2}, runtime.status()["reason"]
    assert relative_error(made[0], exact[0]) < 1e-5
    assert [note.split(",")[0] for note in adapter.notes()] == [called]
    host.switch(False)
    assert relative_error(host.generate()[0], exact[0]) > 1e-3, "the host's own is used again"


@pytest.mark.parametrize("host", FAMILY, indirect=True)
def test_an_exact_attention_that_is_wrong_is_a_disagreement(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = host.start()
    choose(host, adapter, "attention_basic", 1.5, monkeypatch)
    made, calls = calls_of(host.generate)
    assert calls == {"host": 2} and "it differs from the model's own forward" in runtime.status()["reason"]
    assert adapter.notes() == []

"""Numbers that functions of extensions keep between calls are set back after calls that the host would not make."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lib_onediff.weights.function_state import FunctionState


def counting(counter: Any) -> Callable[[], int]:
    """As Regional Prompter's forwards: a closure over the object that counts."""

    def forward() -> int:
        counter.count += 1
        return counter.count

    return forward


@pytest.mark.parametrize(("module", "is_set_back"), [
    # Its own, one of its package's, and a script, which a WebUI names by its file.
    (__name__, True), (f"{__name__}.more", True), ("rp.py", True),
    ("somebody_else", False),
])
def test_numbers_of_the_extensions_own_objects_are_set_back(module: str, is_set_back: bool) -> None:
    counter = type("Counter", (), {"__module__": module})()
    counter.count, counter.name = 0, "kept"
    forward = counting(counter)
    forward()
    rewind = FunctionState([forward]).save()
    assert forward() == 2
    counter.name = "changed"
    rewind()
    assert forward() == (2 if is_set_back else 3) and counter.name == "changed"

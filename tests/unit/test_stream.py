"""A generator shown by one short request after the other."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("gradio")

import gradio

from lib_onediff.ui.events import show_stream


def counting(up_to: int) -> Iterator[tuple[int]]:
    for number in range(up_to):
        yield (number,)


@pytest.fixture
def handler() -> Callable[[str], Callable[..., Any]]:
    with gradio.Blocks() as page:
        up_to, button, shown = gradio.Number(), gradio.Button(), gradio.Number()
        show_stream(button.click, counting, [up_to], [shown])
    functions = page.fns.values() if isinstance(page.fns, dict) else page.fns
    return {function.fn.__name__: function.fn for function in functions}.__getitem__


def test_every_answer_asks_for_the_next_until_there_is_none(handler: Callable[..., Any]) -> None:
    value, turn, stream = handler("begin")(3)
    shown, turns = [value], [turn]
    while turn:
        value, turn = handler("step")(stream, turn)
        shown.append(value)
        turns.append(turn)
    assert shown == [0, 1, 2, gradio.update()]
    assert len(set(turns)) == len(turns), "a page does not notice a turn that stays the same"
    assert handler("step")(stream, "") == (gradio.update(), gradio.update())


def test_a_stream_begun_while_another_ends_goes_on(handler: Callable[..., Any]) -> None:
    """The page misses the new one's first turn, because the old one's request is still open."""
    _, turn, old = handler("begin")(1)
    _, _, new = handler("begin")(3)
    _, turn = handler("step")(old, turn)
    assert turn == "", "which is a change that asks for the next"
    value, turn = handler("step")(new, turn)
    assert (value, turn) == (1, "1")

"""Show what a generator yields, one short request after the other.

gradio has generators of its own, but gradio 3 never ends the connection of a page that was left while one was running,
and then the WebUI's "Reload UI" waits for it for ever. Here nothing is open but a request that soon answers.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import gradio as gr

from .events import QUIET, kept_out_of_defaults

UNCHANGED = gr.update()
Values = tuple[Any, ...]


class Stream:
    """A generator that two requests of one page may ask at the same time."""

    def __init__(self, values: Iterator[Values]) -> None:
        self._values = values
        self._lock = threading.Lock()

    def next(self) -> Values | None:
        """The next values, or None when there are no more."""
        with self._lock:
            return next(self._values, None)


def show_stream(
    events: list[Callable[..., Any]], generate: Callable[..., Iterator[Values]], inputs: list[Any], outputs: list[Any]
) -> None:
    """Show everything that generate(*inputs) yields, each time a tuple with a value for each of outputs.

    events: what begins it: methods of components or of events that take a handler (button.click, clicked.then).
    """
    stream = gr.State(None)
    turn = kept_out_of_defaults(gr.Textbox("", visible=False))

    def step(stream: Stream | None, turn: str) -> Values:
        values = stream.next() if stream is not None else None
        if values is None:
            # A stream that was begun while this one was busy is taken up by the change to "".
            return *[UNCHANGED] * len(outputs), "" if turn else UNCHANGED
        return *values, str(int(turn or 0) + 1)

    def begin(*values: Any) -> Values:
        begun = Stream(generate(*values))
        return *step(begun, ""), begun

    # The change that a request makes to turn asks for the next one.
    for event in events:
        event(begin, inputs=inputs, outputs=[*outputs, turn, stream], queue=False, **QUIET)
    turn.change(step, inputs=[stream, turn], outputs=[*outputs, turn], queue=False, **QUIET)

"""Infotext: the text in an image that says how it was made, and reading it back."""
from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import gradio as gr

PARAMETER = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')
SIZE = re.compile(r"^(\d+)x(\d+)$")


def quote(text: Any) -> Any:
    """A value as it stands in infotext: in quotes when it has a comma, a colon or a line break."""
    if any(mark in str(text) for mark in ",\n:"):
        return json.dumps(text, ensure_ascii=False)
    return text


def parse_generation_parameters(infotext: str) -> dict[str, Any]:
    """Infotext as a mapping: "Prompt", "Negative prompt", and what the last line names; sizes as "Size-1", "Size-2"."""
    *lines, last = infotext.strip().split("\n")
    if len(PARAMETER.findall(last)) < 3:
        lines, last = [*lines, last], ""
    prompt, _, negative = "\n".join(lines).partition("Negative prompt:")
    result: dict[str, Any] = {"Prompt": prompt.strip(), "Negative prompt": negative.strip()}
    for name, value in PARAMETER.findall(last):
        if value.startswith('"'):
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        size = SIZE.match(str(value))
        result.update(zip((f"{name}-1", f"{name}-2"), size.groups(), strict=True) if size else {name: value})
    return result


def connect_paste(button: Any, fields: list[Any], text: Any) -> None:
    """Have button read the infotext in the component text into fields, pairs of a component and what fills it.

    That is the name of an infotext parameter, or a function of all of them; None leaves the component as it is.
    """
    def paste(infotext: str) -> list[Any]:
        parameters = parse_generation_parameters(infotext or "")
        values = [target(parameters) if callable(target) else parameters.get(target) for _, target in fields]
        return [
            gr.update() if value is None else gr.update(value=as_in(component, value))
            for value, (component, _) in zip(values, fields, strict=True)
        ]

    button.click(
        paste, inputs=[text], outputs=[component for component, _ in fields], show_progress="hidden",
        api_visibility="private",
    )


def as_in(component: Any, value: Any) -> Any:
    """A value of the kind that a component has; numbers are left as they are where they are none."""
    if not isinstance(component.value, (int, float)) or isinstance(value, bool):
        return value
    with contextlib.suppress(ValueError):
        return float(value)
    return component.value

"""Infotext: the text in an image that says how it was made, and reading it back."""
from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from typing import Any

from .. import errors

PARAMETER = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')
NEGATIVE = re.compile(r"^Negative prompt:", re.MULTILINE)
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
    result: dict[str, Any] = {}
    for name, value in PARAMETER.findall(last):
        if value.startswith('"'):
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        size = SIZE.match(str(value))
        result.update(zip((f"{name}-1", f"{name}-2"), size.groups(), strict=True) if size else {name: value})
    prompts = NEGATIVE.split("\n".join(line.strip() for line in lines), maxsplit=1)
    result.update({"Prompt": prompts[0].strip(), "Negative prompt": "".join(prompts[1:]).strip()})
    return result


def connect_paste(button: Any, fields: list[Any], text: Any) -> None:
    """Have button read the infotext in the component text into fields, pairs of a component and what fills it.

    That is the name of an infotext parameter, or a function of all of them; None leaves the component as it is.
    """
    import gradio as gr

    def paste(infotext: str) -> list[Any]:
        parameters = parse_generation_parameters(infotext or "")
        values = [pasted_value(component, target, parameters) for component, target in fields]
        return [gr.update() if value is None else gr.update(value=value) for value in values]

    button.click(
        paste, inputs=[text], outputs=[component for component, _ in fields], show_progress="hidden", api_name=False
    )


def pasted_value(component: Any, target: str | Callable, parameters: dict[str, Any]) -> Any:
    """What an infotext puts into a component, in the kind of value that the component has; None for nothing."""
    try:
        value = target(parameters) if callable(target) else parameters.get(target)
        kind = type(component.value)
        if value is None or component.value is None:
            return value
        # As A1111 does.
        return value != "False" and bool(value) if kind is bool else float(value) if kind is int else kind(value)
    except Exception:
        errors.report(f"Error executing {target}", exc_info=True)
        return None

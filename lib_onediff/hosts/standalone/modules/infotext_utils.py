"""Infotext: the text in a picture that says how it was made, and reading it back."""
from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from . import script_callbacks

PARAMETER = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')
SIZE = re.compile(r"^(\d+)x(\d+)$")


class PasteField(tuple):
    """A component and the infotext parameter (name or function) that fills it."""

    def __new__(cls, component: Any, target: str | Callable, *, api: str | None = None) -> PasteField:
        return super().__new__(cls, (component, target))

    def __init__(self, component: Any, target: str | Callable, *, api: str | None = None) -> None:
        self.component = component
        self.api = api
        self.label = target if isinstance(target, str) else None
        self.function = target if callable(target) else None


def quote(text: Any) -> Any:
    """A value as it stands in infotext: in quotes when it has a comma, a colon or a line break."""
    if any(mark in str(text) for mark in ",\n:"):
        return json.dumps(text, ensure_ascii=False)
    return text


def unquote(text: str) -> str:
    """Undo quote."""
    if len(text) < 2 or text[0] != '"' or text[-1] != '"':
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse_generation_parameters(infotext: str) -> dict[str, Any]:
    """Infotext as a mapping: "Prompt", "Negative prompt", and what the last line names; sizes as "Size-1", "Size-2"."""
    *lines, last = infotext.strip().split("\n")
    if len(PARAMETER.findall(last)) < 3:
        lines, last = [*lines, last], ""
    text: dict[str, list[str]] = {"Prompt": [], "Negative prompt": []}
    part = "Prompt"
    for line in lines:
        if line.startswith("Negative prompt:"):
            part, line = "Negative prompt", line.removeprefix("Negative prompt:")
        text[part].append(line.strip())
    result: dict[str, Any] = {}
    for name, value in PARAMETER.findall(last):
        value = unquote(value)
        size = SIZE.match(str(value))
        if size:
            result[f"{name}-1"], result[f"{name}-2"] = size.groups()
        else:
            result[name] = value
    result.update({part: "\n".join(lines) for part, lines in text.items()})
    script_callbacks.infotext_pasted_callback(infotext, result)
    return result

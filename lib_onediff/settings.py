"""Every option of the product, defined once.

The settings page, the REST API, compile_unet's arguments and the README table all derive from the fields of Settings.
"""
from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any

HOST_KEY_PREFIX = "onediff_"


def option(default: Any, label: str, explanation: str, choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field that carries what a user interface needs to show it."""
    return field(default=default, metadata={"label": label, "explanation": explanation, "choices": choices})


@dataclass(frozen=True)
class Settings:
    """One consistent set of choices. Immutable, so that a running call cannot see half a change."""

    enabled: bool = option(
        True, "Use OneDiff", "Off: the WebUI's own UNet makes every picture and nothing of ours runs."
    )
    backend: str = option(
        "auto",
        "Backend",
        "auto: CUDA graphs where there is an NVIDIA GPU, else eager. "
        "cudagraph: one graph per resolution, replayed. eager: plain launches, no graphs.",
        choices=("auto", "cudagraph", "eager"),
    )
    verify: bool = option(
        True,
        "Check the first use of every shape",
        "The first UNet call at a new shape also runs the WebUI's own UNet and compares the two. "
        "A difference beyond rounding sends that shape back to the WebUI's own UNet.",
    )

    def __post_init__(self) -> None:
        for option_field in fields(self):
            check_value(option_field, getattr(self, option_field.name))

    @classmethod
    def from_mapping(cls, values: dict[str, Any], base: Settings | None = None) -> Settings:
        """Settings from option names to values; what is not named keeps its value in base (or its default).

        Raises ValueError with a sentence for the user on an unknown name or a value of the wrong kind.
        """
        known = {option_field.name for option_field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"OneDiff has no option {unknown[0]!r}; its options are {', '.join(sorted(known))}.")
        kept = {name: getattr(base or cls(), name) for name in known}
        return cls(**{**kept, **values})


def check_value(option_field: Field, value: Any) -> None:
    """Raise ValueError with a sentence for the user if value does not fit the option."""
    kind = type(option_field.default)
    if type(value) is not kind:
        raise ValueError(f"OneDiff option {option_field.name} takes a {kind.__name__}, not {value!r}.")
    choices = option_field.metadata["choices"]
    if choices and value not in choices:
        raise ValueError(f"OneDiff option {option_field.name} is one of {', '.join(choices)}, not {value!r}.")


def host_key(name: str) -> str:
    """The key under which a WebUI keeps the option called name."""
    return HOST_KEY_PREFIX + name


def markdown_table() -> str:
    """The options as the README shows them; a test holds the README to it."""
    lines = ["| option | values | default | what it does |", "| --- | --- | --- | --- |"]
    for option_field in fields(Settings):
        choices = option_field.metadata["choices"] or (("on", "off") if option_field.type == "bool" else ())
        default = {True: "on", False: "off"}.get(option_field.default, option_field.default)
        label = f"{option_field.metadata['label']} (`{option_field.name}`)"
        lines.append(f"| {label} | {', '.join(choices)} | {default} | {option_field.metadata['explanation']} |")
    return "\n".join(lines)

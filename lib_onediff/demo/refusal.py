"""Errors whose message is a sentence for the user."""
from __future__ import annotations


class Refusal(Exception):
    """The host does not do what was asked; status is the HTTP status of the answer."""

    def __init__(self, sentence: str, status: int = 422) -> None:
        super().__init__(sentence)
        self.status = status


def check_text(name: str, text: str) -> None:
    """Raise Refusal for what no file and no answer can hold: half of a surrogate pair, which JSON can express."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise Refusal(f"{name} holds half of a character (a lone surrogate).") from None


class ModelProblem(Exception):
    """A model cannot be loaded; the message says which and why."""

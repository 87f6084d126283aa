"""Errors whose message is a sentence for the user."""
from __future__ import annotations


class Refusal(Exception):
    """The host does not do what was asked; status is the HTTP status of the answer."""

    def __init__(self, sentence: str, status: int = 422) -> None:
        super().__init__(sentence)
        self.status = status


class ModelProblem(Exception):
    """A model cannot be loaded; the message says which and why."""

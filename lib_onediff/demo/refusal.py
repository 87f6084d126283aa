"""A request that this server does not serve. A file of its own: all that loads a model works without FastAPI."""
from __future__ import annotations

from fastapi import HTTPException


class Refusal(HTTPException):
    """The host does not do what was asked; the detail is a sentence for the user."""

    def __init__(self, sentence: str, status: int = 422) -> None:
        super().__init__(status, sentence)

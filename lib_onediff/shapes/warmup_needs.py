"""What the pre-warm queue asks of a WebUI and of the runtime."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from ..settings import Settings
from .history import History
from .rows import ResolutionRow
from .table import ShapeTable

Result = TypeVar("Result")


class Warms(Protocol):
    """What the queue asks of a WebUI."""

    def warm(self, width: int, height: int, batch: int, tokens: int) -> None:
        """Make one UNet call as the WebUI would, at a size in pixels; batch counts latents. Raises CannotWarm."""

    def warm_decode(self, width: int, height: int, pictures: int) -> None:
        """Decode random latents of so many pictures of a size in pixels, as the WebUI would."""

    def call_shapes(self, pictures: int, tokens: int) -> Iterable[tuple[int, int]]:
        """(latents, tokens) of the UNet calls of so many pictures at once, the usual one first."""

    def model_name(self) -> str | None:
        """What the rows of the loaded checkpoint call its network ("SD1"); None where none is loaded."""

    def exclusively(self, work: Callable[[], Result]) -> Result:
        """Run work() while no picture is being made, and return what it returns."""


class Reports(Protocol):
    """What the queue asks of the runtime."""

    history: History
    settings: Settings
    table: ShapeTable

    def status(self) -> dict[str, Any]:
        """What the last UNet call was; "route", "reason" and "backend" among it."""

    def rows(self) -> list[ResolutionRow]:
        """What is known about every resolution."""

    def compiling(self) -> Iterable[Future[Any]]:
        """Begin what the model still lacks; one after the other what has to end until nothing is lacking."""

    def patience(self) -> contextlib.AbstractContextManager[None]:
        """Inside, a UNet call waits for what is being compiled."""

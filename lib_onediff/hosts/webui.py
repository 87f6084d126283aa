"""What OneDiff needs to know of a WebUI; one adapter per host offers it."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..shapes.warmup import CannotWarm

__all__ = ["CannotWarm", "Result", "WebUI"]
Result = TypeVar("Result")


class WebUI(Protocol):
    """A running WebUI. Nothing of it is changed but by serve(), and stop() undoes all of that."""

    name: str

    def serve(self) -> None:
        """Put our forward into every UNet call. Safe to call twice."""

    def stop(self) -> None:
        """Undo serve() and give every UNet back as it was. Safe to call twice."""

    def hooks(self) -> int:
        """How many hooks of ours are in place: 1 after serve(), however often, and 0 after stop()."""

    def model_loaded(self, sd_model: Any) -> None:
        """The host has loaded a checkpoint."""

    def before_sampling(self, p: Any) -> None:
        """A sampling of the generation p is about to begin."""

    def after_run(self, p: Any) -> None:
        """The generation p is done."""

    def data_folder(self) -> Path:
        """Where the WebUI keeps its own data; our cache folder lies in it by default."""

    def why_not_served(self) -> str | None:
        """One line about the loaded model when its UNet cannot be ours; None when it is, or none is loaded."""

    def warm(self, width: int, height: int, batch: int, tokens: int) -> None:
        """Make one UNet call as the host itself would, at a size in pixels; batch counts the latents of the call.

        Raises CannotWarm. Call it through exclusively().
        """

    def exclusively(self, work: Callable[[], Result]) -> Result:
        """Run work() while the host makes no picture, on the thread that the host would use."""

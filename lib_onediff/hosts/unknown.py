"""The adapter of a WebUI that lacks what OneDiff needs: it hooks nothing, and says why."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..prewarm.job import CannotWarm
from .webui import Result, WebUI


class UnknownHost(WebUI):
    """hosts.webui.WebUI for such a host. reason: what is missing, and in which release, as a sentence."""

    name = "unknown"

    def __init__(self, release: str, reason: str) -> None:
        self.release, self.reason = release, reason

    def serve(self) -> None:
        """Nothing is hooked."""

    def stop(self) -> None:
        """Nothing was hooked."""

    def hooks(self) -> int:
        return 0

    def model_loaded(self, sd_model: Any) -> None:
        """Every checkpoint is the host's."""

    def before_sampling(self, p: Any) -> None:
        """Every sampling is the host's."""

    def after_run(self, p: Any) -> None:
        """Every generation is the host's."""

    def why_not_served(self) -> str:
        return self.reason

    def warm(self, width: int, height: int, batch: int, tokens: int) -> None:
        raise CannotWarm(self.reason)

    def warm_decode(self, width: int, height: int, images: int) -> None:
        raise CannotWarm(self.reason)

    def call_shapes(self, images: int, tokens: int) -> tuple[tuple[int, int], ...]:
        return ((2 * images, tokens),)

    def model_name(self, sd_model: Any = None) -> str | None:
        return None

    def exclusively(self, work: Callable[[], Result]) -> Result:
        return work()

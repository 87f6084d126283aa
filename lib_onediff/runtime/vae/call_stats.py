"""What became of the last decode: for the status line, the API and the console."""
from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any

from ...core.table import Entry

log = logging.getLogger("onediff")

OURS, HOST = ROUTES = ("ours", "host")
SECONDS_UNTIL_TOLD_AGAIN = 10.0


class DecodeStats:
    """The last decode, and how many went by each route."""

    def __init__(self) -> None:
        self.route: str | None = None
        self.reason = ""
        self.entry: Entry | None = None
        self.calls: Counter[str] = Counter()
        self._counted = True
        self._told: dict[tuple[str, str], float] = {}

    def note(self, route: str, reason: str, entry: Entry | None, counted: bool = True) -> None:
        """A decode went by this route; reason: why it was not ours, or not faster. An encode is told, but not counted.
        """
        self.calls[route] += counted
        self._counted = counted
        changed = (route, reason) != (self.route, self.reason)
        self.route, self.reason, self.entry = route, reason, entry
        if not changed:
            return
        now = time.monotonic()
        if now - self._told.get((route, reason), float("-inf")) > SECONDS_UNTIL_TOLD_AGAIN:
            log.info("%s", described(route, reason))
        self._told[route, reason] = now

    def correct(self, route: str, reason: str, entry: Entry | None) -> None:
        """The decode that was noted last went by another route in the end."""
        if self.route is not None:
            self.calls[self.route] -= self._counted
        self.note(route, reason, entry, self._counted)

    def status(self) -> dict[str, Any]:
        """As plain values. Times are medians in milliseconds at the last decode's size."""
        entry = self.entry
        return {
            "route": self.route,
            "reason": self.reason,
            "backend": entry.key.backend if entry else None,
            "resolution": entry.key.resolution if entry else None,
            "decode_ms": entry.own.median_ms if entry else None,
            "host_ms": entry.host.median_ms if entry else None,
            "relative_error": entry.relative_error if entry else None,
            "calls": {route: self.calls[route] for route in ROUTES},
        }


def described(route: str | None, reason: str) -> str:
    """The route of a decode in one line for people; empty before the first."""
    if route is None:
        return ""
    if route == OURS:
        return "VAE: OneDiff" + (f" ({reason})" if reason else "")
    return "VAE: the WebUI's own" + (f", because {reason}" if reason else "")

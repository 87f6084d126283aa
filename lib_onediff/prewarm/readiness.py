"""Whether this process may be sent images: what a load balancer asks before it does."""
from __future__ import annotations

from typing import Any

from ..core.sizes import parse_prewarm
from ..runtime.runtime import Runtime
from .worker import WarmUp

LOADING = "The WebUI is loading its checkpoint."
NO_CHECKPOINT = "Sizes are to be made ready, and no checkpoint is loaded yet: ask for one size by POST prewarm."


class Readiness:
    """Whether what the settings or users want ready is so. Idle warm-up counts for nothing: it gives way to every
    image, and where it did, a machine without images would never get one."""

    def __init__(self, webui: Any, warmup: WarmUp, runtime: Runtime) -> None:
        self._webui, self._warmup, self._runtime = webui, warmup, runtime
        self._had_checkpoint = False

    def look_around(self) -> None:
        """After a reload of the scripts the checkpoint is there already, and nobody tells of it again."""
        self._had_checkpoint = self._webui.model_name() is not None or self._webui.why_not_served() is not None

    def checkpoint_loaded(self) -> None:
        """What a loaded checkpoint wants ready has been queued. Not earlier: the WebUI knows a new checkpoint before it
        tells, and for that moment nothing would be queued."""
        self._had_checkpoint = True

    def why_not(self) -> str:
        """Why images should go elsewhere for now, as a sentence; "" where this process is ready."""
        if not self._had_checkpoint:
            if self._webui.loads_at_start():
                return LOADING
            if self._wants_sizes():
                return NO_CHECKPOINT
        count = sum(job.pending for job in self._warmup.jobs())
        return f"{count} {'size is' if count == 1 else 'sizes are'} being made ready." if count else ""

    def _wants_sizes(self) -> bool:
        """Whether the first checkpoint will have sizes made ready."""
        settings = self._runtime.settings
        wanted = parse_prewarm(settings.prewarm)
        history = self._runtime.history
        return settings.enabled and bool(wanted.sizes or wanted.most_used and history.rows(every_machine=True))

"""What users read on the page, but for what stands in options/settings.py: labels and explanations of options."""
from __future__ import annotations

from ..options.settings import OFF_IN_SETTINGS
from ..shapes.sizes import Size

# --- the accordion ----------------------------------------------------------------------------------------------------

USE = "Use OneDiff for this run"
PRESET, ADVANCED, CHANGES = "Preset", "Advanced", "Changed options for this run"
NOTHING_HERE_COUNTS = f"{OFF_IN_SETTINGS}: nothing here has an effect."
PREWARM = "Pre-warm this size"
NO_IMAGE_YET, OFF = "no image yet", "off in the settings"
UNREADABLE = "OneDiff cannot show its status: see the console."
# Routes, in the title and inside.
SHORT_ROUTES = {"graph": "graph", "plain": "no graph", "blocks": "blocks", "host": "WebUI's UNet"}
ROUTES = {
    "graph": "CUDA graph", "plain": "plain launches", "blocks": "blocks inside the host's loop",
    "host": "the WebUI's own UNet",
}


def this_run(described: str) -> str:
    return f"This run: {described}."


def off_for_this_run(problem: Exception) -> str:
    return f"{problem} OneDiff would be off for this run."


def warming(size: Size, share: float) -> str:
    return f"{size}: {100 * share:.0f} %"


def is_ready(size: Size) -> str:
    return f"✓ {size} is ready"

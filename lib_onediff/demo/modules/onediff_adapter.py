"""Where OneDiff finds its adapter of this host, as it finds those of others by the modules that they offer."""
from __future__ import annotations

from ..adapter import Standalone

__all__ = ["Standalone"]

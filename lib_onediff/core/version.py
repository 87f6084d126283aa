"""Our version: it changes whenever something changes that is computed, stored or shown."""
from __future__ import annotations

__version__ = "0.2.0"

"""Forge's functions that run before and after a sampling."""
from __future__ import annotations

from stand_in_engine import sampling_cleanup, sampling_prepare

__all__ = ["sampling_cleanup", "sampling_prepare"]

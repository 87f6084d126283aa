"""Moved to core.migration; goes today."""
from ..core.migration import *  # noqa: F403

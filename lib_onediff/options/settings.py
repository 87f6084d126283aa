"""Moved to core.settings; goes today."""
from ..core.settings import *  # noqa: F403

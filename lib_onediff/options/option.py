"""Moved to core.option; goes today."""
from ..core.option import *  # noqa: F403

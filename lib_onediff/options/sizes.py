"""Moved to core.sizes; goes today."""
from ..core.sizes import *  # noqa: F403

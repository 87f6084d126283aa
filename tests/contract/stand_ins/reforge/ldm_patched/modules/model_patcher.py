"""ComfyUI's ModelPatcher, as reForge has it."""
from __future__ import annotations

from stand_in_engine import ComfyPatcher as ModelPatcher

__all__ = ["ModelPatcher"]

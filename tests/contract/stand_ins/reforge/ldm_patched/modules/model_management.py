"""ComfyUI's memory management in reForge, on a machine without a GPU."""
from __future__ import annotations

from stand_in_engine import current_loaded_models, get_free_memory, load_models_gpu, module_size

__all__ = ["current_loaded_models", "get_free_memory", "load_models_gpu", "module_size"]

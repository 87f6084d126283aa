"""ComfyUI's memory management, on a machine without a GPU."""
from __future__ import annotations

from typing import Any

from stand_in_engine import get_free_memory, module_size

__all__ = ["current_loaded_models", "get_free_memory", "load_models_gpu", "module_size"]


class LoadedModel:
    def __init__(self, model: Any) -> None:
        self.model, self.model_accelerated = model, False


current_loaded_models: list[LoadedModel] = []


def load_models_gpu(models: list[Any]) -> None:
    current_loaded_models[:] = [LoadedModel(model) for model in models]
    for model in models:
        model.patch_model()

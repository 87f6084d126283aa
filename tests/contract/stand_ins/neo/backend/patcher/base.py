"""Neo's model patcher: like ComfyUI's, with one function on the layer for each LoRA that is not merged."""
from __future__ import annotations

from typing import Any

from stand_in_engine import ComfyPatcher, merged
from torch import Tensor


class OnlineLoRAPatch:
    def __init__(self, name: str, key: str, patch: list[Any]) -> None:
        self.name = name
        self.key = key
        self.patch = [patch]

    def __call__(self, weight: Tensor) -> Tensor:
        return merged(weight, self.patch)


class ModelPatcher(ComfyPatcher):
    def functions(self, key: str, patches: list[Any]) -> list[Any]:
        return [OnlineLoRAPatch("a file", key, patch) for patch in patches]

    def merged(self, key: str, weight: Any, patches: list[Any]) -> Any:
        """The parameter with patches merged. A quantized weight is dequantized for it, and quantized again."""
        layer = self._layer(key)
        if not hasattr(layer, "set_weight"):
            return super().merged(key, weight, patches)
        return layer.set_weight(merged(layer.convert_weight(weight).float(), patches))

    extra_preserved_memory_during_sampling = 0

    def add_extra_preserved_memory_during_sampling(self, memory_in_bytes: int) -> None:
        self.extra_preserved_memory_during_sampling += memory_in_bytes

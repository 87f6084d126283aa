"""Forge's model patcher: its backups of merged weights are in the model's LoRA loader."""
from __future__ import annotations

from typing import Any

import stand_in_engine
from torch import nn


class LoraLoader:
    def __init__(self) -> None:
        self.backup: dict[str, nn.Parameter] = {}


class ModelPatcher(stand_in_engine.ModelPatcher):
    def __init__(self, model: Any) -> None:
        model.lora_loader = self.lora_loader = LoraLoader()
        super().__init__(model, self.lora_loader.backup)

    def put_on(self, key: str, patches: Any) -> None:
        layer = self._layer(key)
        parameter = key.rpartition(".")[2]
        layer.__dict__.setdefault("forge_online_loras", {})[parameter] = patches

    def take_off(self, layer: nn.Module) -> None:
        layer.__dict__.pop("forge_online_loras", None)

"""Forge Classic's model patcher. The backup of a weight with a merged LoRA is a plain tensor, not a parameter. With
weight_inplace_update, merged weights are written into the present tensors."""
from __future__ import annotations

from typing import Any

import torch
from stand_in_engine import ComfyPatcher, merged
from torch import nn


class ModelPatcher(ComfyPatcher):
    weight_inplace_update = False

    def put(self, key: str, value: torch.Tensor) -> None:
        layer: Any = self._layer(key)
        if self.weight_inplace_update:
            layer.weight.data.copy_(value)
        else:
            layer.weight = nn.Parameter(value, requires_grad=False)

    @torch.inference_mode()
    def patch_model(self) -> None:
        for key in list(self.backup):
            self.put(key, self.backup.pop(key))
        weights = self.model.state_dict()
        for key, patches in self.lora.items():
            self.backup[key] = weights[key].to(self.offload_device, copy=self.weight_inplace_update)
            self.put(key, merged(weights[key], patches))

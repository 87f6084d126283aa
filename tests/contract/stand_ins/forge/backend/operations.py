"""Forge's layers: the linear one is no nn.Linear, and a LoRA that is not merged lies beside the weight."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def weight_of(layer: Any) -> Tensor:
    loras = getattr(layer, "forge_online_loras", {}).get("weight", ())
    return layer.weight + sum(loras) if loras else layer.weight


class ForgeOperations:
    class Linear(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, weight_of(self), self.bias)

    class Conv2d(torch.nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return self._conv_forward(x, weight_of(self), self.bias)

    class GroupNorm(torch.nn.GroupNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    class LayerNorm(torch.nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

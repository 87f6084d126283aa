"""Forge's layers. Linear is not a subclass of nn.Linear, and an unmerged LoRA is in an attribute of the layer."""
from __future__ import annotations

import torch
from stand_in_engine import parameters_of
from torch import Tensor
from torch.nn import functional


class ForgeOperations:
    class Linear(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, *parameters_of(self, x))

    class Conv2d(torch.nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return self._conv_forward(x, *parameters_of(self, x))

    class GroupNorm(torch.nn.GroupNorm):
        def forward(self, x: Tensor) -> Tensor:
            return functional.group_norm(x, self.num_groups, *parameters_of(self, x), self.eps)

    class LayerNorm(torch.nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return functional.layer_norm(x, self.normalized_shape, *parameters_of(self, x), self.eps)

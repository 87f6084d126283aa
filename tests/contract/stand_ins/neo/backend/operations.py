"""Neo's layers: each has lists of functions for its weight and its bias."""
from __future__ import annotations

import torch
from stand_in_engine import weight_of
from torch import Tensor
from torch.nn import functional


class ForgeOperations:
    class Linear(torch.nn.Linear):
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

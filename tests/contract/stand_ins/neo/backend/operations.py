"""Neo's layers: each has lists of functions for its weight and its bias."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from stand_in_engine import parameters_of
from torch import Tensor
from torch.nn import functional


class Functions:
    weight_function: Sequence[Any] = ()
    bias_function: Sequence[Any] = ()


class ForgeOperations:
    class Linear(torch.nn.Linear, Functions):
        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, *parameters_of(self, x))

    class Conv2d(torch.nn.Conv2d, Functions):
        def forward(self, x: Tensor) -> Tensor:
            return self._conv_forward(x, *parameters_of(self, x))

    class GroupNorm(torch.nn.GroupNorm, Functions):
        def forward(self, x: Tensor) -> Tensor:
            return functional.group_norm(x, self.num_groups, *parameters_of(self, x), self.eps)

    class LayerNorm(torch.nn.LayerNorm, Functions):
        def forward(self, x: Tensor) -> Tensor:
            return functional.layer_norm(x, self.normalized_shape, *parameters_of(self, x), self.eps)

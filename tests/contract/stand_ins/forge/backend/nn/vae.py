"""Forge's VAE classes, here derived from ldm's."""
from __future__ import annotations

from typing import Any

from backend.attention import attention_function_single_head_spatial
from ldm.modules.diffusionmodules import model
from stand_in_engine import in_own_classes
from torch import Tensor


class AttnBlock(model.AttnBlock):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.proj_out(attention_function_single_head_spatial(self.q(h), self.k(h), self.v(h)))


class Encoder(model.Encoder):
    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        in_own_classes(self, globals())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Decoder(model.Decoder):
    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        in_own_classes(self, globals())

    def forward(self, z: Tensor, **kwargs: Any) -> Tensor:
        return super().forward(z)

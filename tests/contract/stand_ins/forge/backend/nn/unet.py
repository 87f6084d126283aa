"""Forge's and Neo's UNet, with ldm's layers."""
from __future__ import annotations

from typing import Any

from backend.attention import attention_function
from ldm.modules import attention
from ldm.modules.diffusionmodules import openaimodel, util
from stand_in_engine import in_own_classes, popped, walk
from torch import Tensor


def checkpoint(f: Any, args: Any, parameters: Any, enable: bool = False) -> Any:
    return f(*args)


def apply_control(h: Tensor, control: Any, name: str) -> Tensor:
    return popped(h, control, name)


def timestep_embedding(timesteps: Tensor, dim: int) -> Tensor:
    return util.timestep_embedding(timesteps, dim)


class CrossAttention(attention.CrossAttention):
    def forward(
        self, x: Any, context: Any = None, value: Any = None, mask: Any = None, transformer_options: Any = None
    ) -> Tensor:
        context = x if context is None else context
        found = attention_function(self.to_q(x), self.to_k(context), self.to_v(context), self.heads, mask)
        return self.to_out(found)


class IntegratedUNet2DConditionModel(openaimodel.UNetModel):
    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        in_own_classes(self, globals())

    def forward(
        self, x, timesteps=None, context=None, y=None, control=None, transformer_options={}, **kwargs  # noqa: B006
    ):
        transformer_options["original_shape"] = list(x.shape)
        stage = lambda module, h, emb, context: checkpoint(module, (h, emb, context), ())  # noqa: E731
        return walk(
            self, x, timestep_embedding(timesteps, self.model_channels), context, control, apply_control, stage,
            transformer_options.get("patches", {}).get("output_block_patch", ()),
            transformer_options.get("block_modifiers", []),
        )

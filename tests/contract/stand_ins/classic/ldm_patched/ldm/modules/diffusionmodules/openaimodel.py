"""Classic's UNet: ComfyUI's of early 2024, whose forward is the whole of it."""
from __future__ import annotations

from typing import Any

from ldm.modules import attention as ldm_attention
from ldm.modules.diffusionmodules import openaimodel
from ldm_patched.ldm.modules.attention import CrossAttention
from ldm_patched.ldm.modules.diffusionmodules.util import timestep_embedding
from stand_in_engine import popped, walk
from torch import Tensor


def apply_control(h: Tensor, control: Any, name: str) -> Tensor:
    return popped(h, control, name)


def forward_timestep_embed(ts: Any, x: Tensor, emb: Tensor, context: Any = None) -> Tensor:
    return ts(x, emb, context)


class UNetModel(openaimodel.UNetModel):
    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        for module in self.modules():
            if type(module) is ldm_attention.CrossAttention:
                module.__class__ = CrossAttention

    def forward(
        self, x, timesteps=None, context=None, y=None, control=None, transformer_options={}, **kwargs  # noqa: B006
    ):
        transformer_options["original_shape"] = list(x.shape)
        return walk(
            self, x, timestep_embedding(timesteps, self.model_channels), context, control, apply_control,
            forward_timestep_embed, transformer_options.get("patches", {}).get("output_block_patch", ()),
            transformer_options.get("block_modifiers", ()),
        )

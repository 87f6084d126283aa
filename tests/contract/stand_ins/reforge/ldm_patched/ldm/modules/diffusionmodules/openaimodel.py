"""reForge's UNet, with ldm's layers: its forward calls _forward."""
from __future__ import annotations

from typing import Any

from ldm.modules.diffusionmodules import openaimodel
from ldm_patched.ldm.modules.attention import CrossAttention  # noqa: F401
from ldm_patched.ldm.modules.diffusionmodules.util import timestep_embedding
from stand_in_engine import in_own_classes, popped, walk
from torch import Tensor


def apply_control(h: Tensor, control: Any, name: str) -> Tensor:
    return popped(h, control, name)


def forward_timestep_embed(ts: Any, x: Tensor, emb: Tensor, context: Any = None) -> Tensor:
    return ts(x, emb, context)


class UNetModel(openaimodel.UNetModel):
    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        in_own_classes(self, globals())

    def forward(
        self, x, timesteps=None, context=None, y=None, control=None, transformer_options={}, **kwargs  # noqa: B006
    ):
        return self._forward(x, timesteps, context, y, control, transformer_options, **kwargs)

    def _forward(
        self, x, timesteps=None, context=None, y=None, control=None, transformer_options={}, **kwargs  # noqa: B006
    ):
        transformer_options["original_shape"] = list(x.shape)
        return walk(
            self, x, timestep_embedding(timesteps, self.model_channels), context, control, apply_control,
            forward_timestep_embed, transformer_options.get("patches", {}).get("output_block_patch", ()),
        )

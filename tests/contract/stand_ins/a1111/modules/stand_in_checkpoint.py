"""A checkpoint like ldm's LatentDiffusion."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from modules.devices import autocast
from torch import Tensor, nn


class LatentDiffusion:
    def __init__(self, unet: nn.Module, encoder: nn.Module, decoder: nn.Module) -> None:
        self.model = SimpleNamespace(diffusion_model=unet)
        self.first_stage_model = SimpleNamespace(encoder=encoder, decoder=decoder)

    def apply_model(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        with autocast():
            return self.model.diffusion_model(x, t, context=cond["c_crossattn"][0])

    def decode_first_stage(self, z: Tensor) -> Tensor:
        return self.first_stage_model.decoder(z)

    def encode_first_stage(self, x: Tensor) -> Tensor:
        return self.first_stage_model.encoder(x)

"""The sinusoidal timestep embedding that reForge's UNet calls."""
from __future__ import annotations

from ldm.modules.diffusionmodules import util
from torch import Tensor


def timestep_embedding(timesteps: Tensor, dim: int) -> Tensor:
    return util.timestep_embedding(timesteps, dim)

"""The networks to measure, with random weights or from a file."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.guard import first_line
from ..public import load_unet

SD15 = {"block_out_channels": (320, 640, 1280, 1280), "cross_attention_dim": 768, "attention_head_dim": 8}
SD21 = {
    "block_out_channels": (320, 640, 1280, 1280), "cross_attention_dim": 1024, "attention_head_dim": (5, 10, 20, 20),
    "use_linear_projection": True,
}
SDXL = {
    "block_out_channels": (320, 640, 1280), "cross_attention_dim": 2048, "attention_head_dim": (5, 10, 20),
    "transformer_layers_per_block": (1, 2, 10), "use_linear_projection": True,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
TINY_SD15 = {**SD15, "block_out_channels": (32, 64, 128, 128), "cross_attention_dim": 64, "attention_head_dim": 4}
TINY_SDXL = {
    **SDXL, "block_out_channels": (32, 64, 128), "cross_attention_dim": 64, "attention_head_dim": (2, 4, 8),
    "transformer_layers_per_block": (1, 1, 2), "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 112,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "sd15": SD15, "sd21": SD21, "sdxl": SDXL, "tiny-sd15": TINY_SD15, "tiny-sdxl": TINY_SDXL,
}
# The number of sizes and offsets that SDXL takes for each row of a call.
TIME_IDS = 6
SDXL_VAE = {
    "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
    "sample_size": 1024, "scaling_factor": 0.13025,
}
TINY_VAE = {**SDXL_VAE, "block_out_channels": (32, 32, 64, 64), "layers_per_block": 1, "sample_size": 64}


def random_unet(name: str, device: torch.device) -> nn.Module:
    """diffusers' UNet2DConditionModel of the configuration with this name, with random float32 weights; see
    random_model."""
    from diffusers import UNet2DConditionModel

    return random_model(UNet2DConditionModel, CONFIGURATIONS[name], device)


def random_vae(tiny: bool, device: torch.device) -> nn.Module:
    """diffusers' AutoencoderKL of SDXL's configuration, or a tiny one, with random float32 weights; see
    random_model."""
    from diffusers import AutoencoderKL

    return random_model(AutoencoderKL, TINY_VAE if tiny else SDXL_VAE, device)


def random_model(kind: type[Any], configuration: dict[str, Any], device: torch.device) -> nn.Module:
    """A model of this class and configuration on a device, ready for inference, with random float32 weights that are
    the same each time. Sets torch's seed."""
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = kind(**configuration)
    return model.eval().requires_grad_(False)


def pooled_width(config: Any) -> int:
    """The width of SDXL's pooled text embedding."""
    width: int = config.projection_class_embeddings_input_dim - TIME_IDS * config.addition_time_embed_dim
    return width


def unet_named(name: str, device: torch.device) -> nn.Module:
    """A UNet in float32: of the configuration with this name, with random weights; otherwise from the diffusers folder
    or checkpoint file at this path. Raises ValueError, with a sentence for users, if it cannot be loaded."""
    if name in CONFIGURATIONS:
        return random_unet(name, device)
    path = Path(name)
    try:
        unet: nn.Module = load_unet(path)
    except Exception as error:
        raise ValueError(f"{path} could not be loaded as a UNet: {first_line(error)}") from error
    return unet.to(device, torch.float32).eval().requires_grad_(False)


def inputs(unet: nn.Module, width: int, height: int, batch: int, tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    """Random keyword arguments of one UNet call, as a diffusers pipeline passes them; the same for each call of this
    function with the same arguments. width, height: in pixels. batch: rows of the call. tokens: the context length.
    dtype: of the tensors, except for the float32 timestep."""
    device = next(unet.parameters()).device
    generator = torch.Generator("cpu").manual_seed(width * 10000 + height)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)

    config: Any = unet.config
    arguments: dict[str, Any] = {
        "sample": random(batch, config.in_channels, height // 8, width // 8),
        "timestep": torch.tensor(601.0, dtype=torch.float32, device=device),
        "encoder_hidden_states": random(batch, tokens, config.cross_attention_dim),
    }
    if config.addition_embed_type == "text_time":
        sizes = torch.tensor([[height, width, 0, 0, height, width]] * batch, device=device, dtype=dtype)
        arguments["added_cond_kwargs"] = {"text_embeds": random(batch, pooled_width(config)), "time_ids": sizes}
    return arguments

"""The networks of emoji-sd: Stable Diffusion 1.5's classes with few channels, ten million parameters in all."""
from __future__ import annotations

from typing import Any

from torch import nn

from ..checkpoint_config import TRAINING_SCHEDULE
from .vocabulary import MOST_TOKENS, POSITIONS

MOST_PARAMETERS = 10_000_000
LATENT_CHANNELS, REDUCTION = 4, 8
# What Stable Diffusion 1.5 multiplies latents by; some programs take it for granted.
SCALING_FACTOR = 0.18215
TEXT_WIDTH = 128
# With the velocity (Salimans and Ho 2022) plain backgrounds keep their colour in a small network: the noise does not
# have to be predicted to a thousandth where there is little else.
PREDICTION = "v_prediction"


def make_unet() -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=32, block_out_channels=(64, 96, 128, 128), layers_per_block=1, cross_attention_dim=TEXT_WIDTH,
        # The number of heads: diffusers calls it so.
        attention_head_dim=4, norm_num_groups=16,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    )


def make_text_encoder() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(CLIPTextConfig(
        vocab_size=MOST_TOKENS, hidden_size=TEXT_WIDTH, intermediate_size=4 * TEXT_WIDTH, projection_dim=TEXT_WIDTH,
        num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=POSITIONS, hidden_act="quick_gelu",
        bos_token_id=MOST_TOKENS - 2, eos_token_id=MOST_TOKENS - 1, pad_token_id=MOST_TOKENS - 1,
    ))


def make_vae() -> Any:
    """Groups of four channels and more: a norm over two of them takes away what colour they carry."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(32, 48, 64, 80), layers_per_block=1, norm_num_groups=8, latent_channels=LATENT_CHANNELS,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4, sample_size=256,
        scaling_factor=SCALING_FACTOR, force_upcast=False,
    )


def make_schedule() -> Any:
    from diffusers import DDIMScheduler

    return DDIMScheduler(**TRAINING_SCHEDULE, prediction_type=PREDICTION)


def size_of(*networks: nn.Module) -> int:
    """How many parameters they have."""
    return sum(parameter.numel() for network in networks for parameter in network.parameters())

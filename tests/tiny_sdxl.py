"""A small random SDXL pipeline, as tiny_model makes one of SD 1.5."""
from __future__ import annotations

from typing import Any

from tiny_model import (
    DEFAULT_SEED,
    GROUPS,
    TEXT_WIDTH,
    byte_tokenizer,
    seeded,
    text_config,
    tiny_vae,
    training_schedule,
)
from tiny_weights import shape_unet

SECOND_TEXT_WIDTH = 96
TIME_ID_WIDTH = 32


def tiny_sdxl_pipeline(seed: int = DEFAULT_SEED) -> Any:
    """A random StableDiffusionXLPipeline in float32: SDXL's topology with full transformer depth 2, 10 and narrow
    channels; the same seed gives the same weights."""
    from diffusers import StableDiffusionXLPipeline
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    with seeded(seed):
        unet = tiny_sdxl_unet()
        text_encoder = CLIPTextModel(text_config(TEXT_WIDTH, spread=1.5))
        text_encoder_2 = CLIPTextModelWithProjection(text_config(SECOND_TEXT_WIDTH, "gelu", spread=1.5))
        vae = tiny_vae(scaling_factor=0.13025)
    return StableDiffusionXLPipeline(
        vae=vae, text_encoder=text_encoder.eval(), text_encoder_2=text_encoder_2.eval(), tokenizer=byte_tokenizer(),
        tokenizer_2=byte_tokenizer(pad_token="!"), unet=unet, scheduler=training_schedule(),
        force_zeros_for_empty_prompt=True, add_watermarker=False,
    )


def tiny_sdxl_unet() -> Any:
    """SDXL's UNet topology with channels 32, 64, 128 and heads of width 8."""
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel(
        sample_size=128, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), block_out_channels=(32, 64, 128),
        transformer_layers_per_block=(1, 2, 10), norm_num_groups=GROUPS,
        cross_attention_dim=TEXT_WIDTH + SECOND_TEXT_WIDTH, attention_head_dim=(4, 8, 16),
        use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=TIME_ID_WIDTH,
        projection_class_embeddings_input_dim=SECOND_TEXT_WIDTH + 6 * TIME_ID_WIDTH,
    )
    shape_unet(unet)
    return unet.eval()

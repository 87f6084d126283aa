"""Small random pipelines with the topology of real ones, made by code, without weights in git or downloads."""
from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tiny_weights import randomise

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, StableDiffusionPipeline
    from diffusers.schedulers import DDIMScheduler
    from transformers import CLIPTextConfig, CLIPTokenizer

# The noise schedule of Stable Diffusion 1, 2 and XL. Our models predict v, as some of SD 2 do, because then untrained
# networks make images too: computing a step's image needs no division by a small number.
TRAINING_SCHEDULE: dict[str, Any] = {
    "prediction_type": "v_prediction",
    "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "clip_sample": False,
    "set_alpha_to_one": False, "steps_offset": 1,
}
START = "<|startoftext|>"
END = "<|endoftext|>"
BYTE_TOKENS = 2 * 256 + 2
DEFAULT_SEED = 15
TEXT_WIDTH = 64
SECOND_TEXT_WIDTH = 96
TIME_ID_WIDTH = 32
GROUPS = 8


def tiny_sd15_pipeline(seed: int = DEFAULT_SEED) -> StableDiffusionPipeline:
    """A random StableDiffusionPipeline in float32 with SD1.5's UNet topology; the same seed gives the same weights."""
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextModel

    with seeded(seed):
        unet: Any = UNet2DConditionModel(
            sample_size=32, block_out_channels=(32, 64, 128, 128), norm_num_groups=GROUPS,
            cross_attention_dim=TEXT_WIDTH, attention_head_dim=8,
        )
        text_encoder = CLIPTextModel(text_config(TEXT_WIDTH))
        vae = tiny_vae(scaling_factor=0.18215)
    return StableDiffusionPipeline(
        vae=vae, text_encoder=text_encoder.eval(), tokenizer=byte_tokenizer(), unet=random_unet(unet, seed),
        scheduler=training_schedule(), safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )


def tiny_sdxl_pipeline(seed: int = DEFAULT_SEED) -> Any:
    """A random StableDiffusionXLPipeline in float32: SDXL's topology with full transformer depth 2, 10, and channels
    32, 64, 128 with heads of width 8; the same seed gives the same weights."""
    from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    with seeded(seed):
        unet = UNet2DConditionModel(
            sample_size=128, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), block_out_channels=(32, 64, 128),
            transformer_layers_per_block=(1, 2, 10), norm_num_groups=GROUPS,
            cross_attention_dim=TEXT_WIDTH + SECOND_TEXT_WIDTH, attention_head_dim=(4, 8, 16),
            use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=TIME_ID_WIDTH,
            projection_class_embeddings_input_dim=SECOND_TEXT_WIDTH + 6 * TIME_ID_WIDTH,
        )
        text_encoder = CLIPTextModel(text_config(TEXT_WIDTH, spread=1.5))
        text_encoder_2 = CLIPTextModelWithProjection(text_config(SECOND_TEXT_WIDTH, "gelu", spread=1.5))
        vae = tiny_vae(scaling_factor=0.13025)
    return StableDiffusionXLPipeline(
        vae=vae, text_encoder=text_encoder.eval(), text_encoder_2=text_encoder_2.eval(), tokenizer=byte_tokenizer(),
        tokenizer_2=byte_tokenizer(pad_token="!"), unet=random_unet(unet, seed), scheduler=training_schedule(),
        force_zeros_for_empty_prompt=True, add_watermarker=False,
    )


def random_unet(unet: Any, seed: int) -> Any:
    """A UNet with random weights whose steps change an image a little, as a trained one's do."""
    with torch.no_grad():
        randomise(unet, seed).conv_out.weight.mul_(0.3)
    return unet


def tiny_vae(scaling_factor: float) -> AutoencoderKL:
    """A random AutoencoderKL that reduces images by a factor of eight, as the real ones do."""
    from diffusers import AutoencoderKL

    vae: Any = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(32,) * 4, layers_per_block=1, norm_num_groups=GROUPS, scaling_factor=scaling_factor,
        force_upcast=False,
    )
    return randomise(vae)


def text_config(width: int, activation: str = "quick_gelu", spread: float = 4.0) -> CLIPTextConfig:
    """The configuration of a two-layer CLIP text encoder over the byte vocabulary.

    spread: the standard deviation of its initial weights. SDXL uses a hidden state without a norm after it, so it must
    be small there: a context of large numbers saturates cross-attention, and rounding errors become visible.
    """
    from transformers import CLIPTextConfig

    return CLIPTextConfig(
        vocab_size=BYTE_TOKENS, hidden_size=width, intermediate_size=4 * width, projection_dim=width,
        num_hidden_layers=2, num_attention_heads=4, hidden_act=activation, bos_token_id=BYTE_TOKENS - 2,
        eos_token_id=BYTE_TOKENS - 1, pad_token_id=BYTE_TOKENS - 1, initializer_factor=spread,
    )


def training_schedule() -> DDIMScheduler:
    """The noise schedule that SD1, SD2 and SDXL were trained with."""
    from diffusers import DDIMScheduler

    return DDIMScheduler(**TRAINING_SCHEDULE)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context in which initial weights are drawn from this seed; restores the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def byte_tokenizer(pad_token: str = END) -> CLIPTokenizer:
    """A CLIPTokenizer of 77 positions whose tokens are single bytes (75 characters of ASCII fill one chunk)."""
    from transformers import CLIPTokenizer

    with tempfile.TemporaryDirectory(prefix="onediff-tokenizer-") as folder:
        write_byte_vocabulary(Path(folder))
        return CLIPTokenizer.from_pretrained(
            folder, unk_token=END, bos_token=START, eos_token=END, pad_token=pad_token, model_max_length=77,
        )


def write_byte_vocabulary(folder: Path) -> None:
    """Write CLIP's vocab.json, and a merges.txt without merges. The tokens: each byte inside of a word, each byte at
    the end of a word, START and END."""
    # How CLIP writes bytes: those that can be read as they are, first, and the others from the 256th letter on.
    readable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    symbols = [*map(chr, readable), *(chr(256 + number) for number in range(256 - len(readable)))]
    tokens = [*symbols, *(symbol + "</w>" for symbol in symbols), START, END]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")

"""Whole diffusers pipelines, small and random, with and without compile_pipe: at most 1/255 apart."""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from builders import CONTEXT_WIDTH, LCM, POOLED_WIDTH, SD1, SDXL, SMALL, SMALL_XL, diffusers_unet, randomise

import lib_onediff

# Of the schedulers' defaults and of NumPy 2.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "DeprecationWarning")]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    from diffusers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()
    logging.set_verbosity(before)


def tiny_vae() -> Any:
    from diffusers import AutoencoderKL

    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    return randomise(AutoencoderKL(**blocks, block_out_channels=(8,) * 4, norm_num_groups=4, layers_per_block=1), 5)


def pipeline(name: str, layout: dict[str, Any], scheduler: str = "DDIMScheduler") -> Any:
    """A pipeline without text encoders: it is given embeddings."""
    import diffusers

    parts: dict[str, Any] = {
        "vae": tiny_vae(), "unet": diffusers_unet(**layout, sample_size=8), "text_encoder": None, "tokenizer": None,
        "scheduler": getattr(diffusers, scheduler)(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012),
    }
    if "XL" in name:
        parts |= {"text_encoder_2": None, "tokenizer_2": None}
    else:
        parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    pipe = getattr(diffusers, name)(**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def picture(width: int, height: int) -> Any:
    from PIL import Image

    waves = numpy.sin(numpy.linspace(0, 40, width * height * 3)).reshape(height, width, 3)
    return Image.fromarray((127 * (waves + 1)).astype("uint8"))


def inputs(name: str, width: int, height: int, seed: int = 0) -> dict[str, Any]:
    embed = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    given: dict[str, Any] = {
        "prompt_embeds": embed(1, 77, CONTEXT_WIDTH), "negative_prompt_embeds": embed(1, 77, CONTEXT_WIDTH),
        "generator": torch.Generator().manual_seed(seed), "num_inference_steps": 4, "output_type": "np",
        "guidance_scale": 3.0,
    }
    if "XL" in name:
        given["pooled_prompt_embeds"] = embed(1, POOLED_WIDTH)
        given["negative_pooled_prompt_embeds"] = embed(1, POOLED_WIDTH)
    if "Img2Img" in name or "Inpaint" in name:
        given |= {"image": picture(width, height), "strength": 0.75}
    if "Inpaint" in name:
        given["mask_image"] = picture(width, height).convert("L").point(lambda level: 255 * (level > 128))
    if "Img2Img" not in name:
        given |= {"width": width, "height": height}
    return given


def image_of(pipe: Any, width: int = 64, height: int = 64) -> numpy.ndarray:
    return pipe(**inputs(type(pipe).__name__, width, height)).images[0]


def calls(route: str) -> int:
    return lib_onediff.status()["calls"][route]
# What a pipeline does with a UNet does not depend on its depth.
WITH_GUIDANCE = {**SMALL, "time_cond_proj_dim": LCM["time_cond_proj_dim"]}
UPCAST = {**SMALL, "attention_head_dim": (2, 4), "use_linear_projection": True, "upcast_attention": True}
NINE_CHANNELS = {**SMALL, "in_channels": 9}
NINE_CHANNELS_XL = {**SMALL_XL, "in_channels": 9}
CASES = {
    "SD1 with fractional timesteps": ("StableDiffusionPipeline", SMALL, "EulerDiscreteScheduler"),
    "SD2": ("StableDiffusionPipeline", UPCAST, "DPMSolverMultistepScheduler"),
    "LCM": ("StableDiffusionPipeline", WITH_GUIDANCE, "LCMScheduler"),
    "SD1 img2img": ("StableDiffusionImg2ImgPipeline", SMALL, "PNDMScheduler"),
    "SD1 inpaint, 9 channels": ("StableDiffusionInpaintPipeline", NINE_CHANNELS, "DDIMScheduler"),
    "SDXL": ("StableDiffusionXLPipeline", SMALL_XL, "EulerDiscreteScheduler"),
    "SDXL img2img": ("StableDiffusionXLImg2ImgPipeline", SMALL_XL, "DDIMScheduler"),
    "SDXL inpaint, 9 channels": ("StableDiffusionXLInpaintPipeline", NINE_CHANNELS_XL, "LCMScheduler"),
}
# But for sizes that are odd at each level.
ODD = {
    "SD1": ("StableDiffusionPipeline", SD1, "DDIMScheduler"),
    "SDXL inpaint": ("StableDiffusionXLInpaintPipeline", SDXL, "DDIMScheduler"),
}


@pytest.mark.parametrize(
    ("case", "size"),
    [*((case, (64, 64)) for case in CASES.values()), *((case, (88, 72)) for case in ODD.values())],
    ids=[*CASES, *(f"{name} at 88x72" for name in ODD)],
)
def test_a_compiled_pipeline_is_within_1_of_255_of_diffusers_and_equal_when_uncompiled(
    case: tuple, size: tuple[int, int]
) -> None:
    """Our forward computes every UNet call of the compiled pipeline. case: the pipeline's class, the UNet's layout, the
    scheduler. size: width and height."""
    pipe = pipeline(*case)
    expected = image_of(pipe, *size)
    assert expected.std() > 0.05 and numpy.isfinite(expected).all()
    assert lib_onediff.compile_pipe(pipe) is pipe
    before = calls("plain"), calls("host")
    image = image_of(pipe, *size)
    assert calls("plain") > before[0] and calls("host") == before[1], lib_onediff.status()["reason"]
    assert numpy.abs(image - expected).max() <= 1 / 255
    assert lib_onediff.uncompile_pipe(pipe) is pipe
    assert numpy.array_equal(image_of(pipe, *size), expected)
    assert "forward" not in pipe.unet.__dict__


def test_uncompiling_one_of_two_pipelines_that_share_a_unet_uncompiles_both() -> None:
    """Images of the second pipeline are compared with those before it was compiled."""
    from diffusers import StableDiffusionImg2ImgPipeline

    pipe = pipeline("StableDiffusionPipeline", SMALL)
    other = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    expected = image_of(other)
    lib_onediff.compile_pipe(pipe)
    lib_onediff.compile_pipe(other)
    before = calls("plain")
    assert numpy.abs(image_of(other) - expected).max() <= 1 / 255
    assert calls("plain") > before
    lib_onediff.uncompile_pipe(pipe)
    assert numpy.array_equal(image_of(other), expected)

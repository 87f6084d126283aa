"""What a generation may ask for; everything else is refused with a sentence before anything is computed."""
from __future__ import annotations

import math
from typing import Any

from .modules import sd_samplers
from .refusal import Refusal

SIZE_STEP = 8
SMALLEST_SIDE, LARGEST_SIDE = 64, 2048
MOST_STEPS = 150
MOST_IMAGES_AT_ONCE = 8
MOST_BATCHES = 100
LARGEST_CFG = 30.0
LARGEST_SEED = 2**53 - 1
RESIZE_MODES = (0, 1)
# In bytes, of which a letter of English has one and an emoji four: a byte may be a token.
LONGEST_PROMPT = 6000


def check(p: Any) -> None:
    """Raise Refusal unless this host can make what p asks for; p is a StableDiffusionProcessing."""
    check_size("width", p.width)
    check_size("height", p.height)
    check_range("steps", p.steps, 1, MOST_STEPS)
    check_range("batch_size", p.batch_size, 1, MOST_IMAGES_AT_ONCE)
    check_range("n_iter", p.n_iter, 1, MOST_BATCHES)
    check_range("cfg_scale", p.cfg_scale, 1, LARGEST_CFG)
    check_range("seed", p.seed, -1, LARGEST_SEED)
    check_prompt("prompt", p.prompt)
    check_prompt("negative_prompt", p.negative_prompt)
    sampler, schedule = sd_samplers.find(p.sampler_name, p.scheduler)
    p.sampler_name, p.scheduler = sampler.name, schedule
    if hasattr(p, "init_images"):
        check_image_inputs(p)


def check_size(name: str, value: int) -> None:
    """A side in pixels: a multiple of SIZE_STEP between the limits."""
    if not SMALLEST_SIDE <= value <= LARGEST_SIDE:
        raise Refusal(f"{name} is {value}; it must be between {SMALLEST_SIDE} and {LARGEST_SIDE} pixels.")
    if value % SIZE_STEP:
        below = value - value % SIZE_STEP
        raise Refusal(
            f"{name} is {value}; it must be a multiple of {SIZE_STEP}, for example {below} or {below + SIZE_STEP}."
        )


def check_range(name: str, value: float, least: float, most: float) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        raise Refusal(f"{name} is {value}; it must be between {least:g} and {most:g}.")


def check_prompt(name: str, text: str) -> None:
    """As much as is encoded in seconds."""
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        # JSON can express half of a surrogate pair, which no file and no answer can hold.
        raise Refusal(f"{name} holds half of a character (a lone surrogate).") from None
    if size > LONGEST_PROMPT:
        raise Refusal(f"{name} has {size} bytes in UTF-8; it must have {LONGEST_PROMPT} at most.")


def check_image_inputs(p: Any) -> None:
    """What img2img asks for beside txt2img."""
    if not p.init_images:
        raise Refusal("img2img needs an init image.")
    check_range("denoising_strength", p.denoising_strength, 0, 1)
    if int(p.steps * p.denoising_strength) < 1:
        raise Refusal(
            f"{p.steps} steps at a denoising strength of {p.denoising_strength:g} come to less than one step; "
            "raise either."
        )
    if p.resize_mode not in RESIZE_MODES:
        raise Refusal("resize_mode must be 0 (just resize) or 1 (crop and resize) here.")
    check_range("mask_blur", p.mask_blur, 0, 64)

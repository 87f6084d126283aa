"""Measure whole images through a pipeline of diffusers, sampler and decode included."""
from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..public import compile_pipe, uncompile_pipe
from ..runtime.runtime import runtime
from .clock import give_back_memory, seconds
from .image_settings import IMAGE_SETTINGS, TIMED
from .models import TOKENS, VOCABULARY, pooled_width, random_text_encoders, random_unet, random_vae
from .options import DTYPES, Size, kind_of, name_of, sizes_for

HOST = "host eager"
# Compiling, checking and capturing are over after so many images that wait for kernels, and so many that do not.
WAITING_IMAGES, SETTLING_IMAGES = 2, 1
MOST_RUNS = 5
HEADINGS = ("model", "size", "pipeline", "s an image", "x host", "mean difference", "largest", "route")
# A prompt's embedding is quieter than an image's noise.
PROMPT_NOISE = 0.1


@dataclass
class ImageRow:
    """One pipeline at one size. seconds: the median of one image; differences: from the host's image, of a range of 1.
    """

    model: str
    size: str
    pipeline: str
    seconds: float
    ratio: float
    mean_difference: float = 0.0
    largest_difference: float = 0.0
    route: str = ""
    times: list[float] = field(default_factory=list, repr=False)

    def cells(self) -> list[str]:
        difference = ["", ""] if self.pipeline == HOST else [
            f"{self.mean_difference:.4f}", f"{self.largest_difference:.3f}"
        ]
        times = [f"{self.seconds:.3f}", f"{self.ratio:.2f}"]
        return [self.model, self.size, self.pipeline, *times, *difference, self.route]


class Images:
    """A pipeline with random weights that draws images of a size, from the same numbers every time.

    at_once: how many. text_encoders: whether the prompt goes through text encoders for each of them, as a user's does.
    """

    def __init__(
        self, model: str, options: argparse.Namespace, device: torch.device, at_once: int = 1,
        text_encoders: bool = False,
    ) -> None:
        self.device, self.dtype, self.steps, self.at_once = device, DTYPES[options.dtype], options.steps, at_once
        unet = random_unet(model, device).to(self.dtype)
        self.pipe = pipeline(unet, random_vae(kind_of(model) == "tiny", device).to(self.dtype))
        self._prompt = self._random_prompt(unet)
        self._encoders = random_text_encoders(unet) if text_encoders else []
        self._ids = torch.randint(VOCABULARY, (2, TOKENS), device=device)

    def draw(self, size: Size) -> Tensor:
        """(at_once, 3, height, width), from 0 to 1."""
        self._encode()
        return self.pipe(
            **self._prompt, width=size[0], height=size[1], num_inference_steps=self.steps,
            guidance_scale=5.0, generator=torch.Generator("cpu").manual_seed(0), output_type="pt",
            num_images_per_prompt=self.at_once,
        ).images

    def make_ready(self, size: Size) -> None:
        """Until nothing is left to compile, to check or to capture."""
        with runtime.wait_for_compile():
            for _ in range(WAITING_IMAGES):
                self.draw(size)
        for _ in range(SETTLING_IMAGES):
            self.draw(size)

    @torch.no_grad()
    def _encode(self) -> None:
        """Encode a prompt and a negative one, for the time. The images are of the same noise with and without."""
        for encoder in self._encoders:
            encoder(self._ids, output_hidden_states=True)

    def timed(self, size: Size, runs: int) -> tuple[list[float], Tensor]:
        """Seconds an image, of some calls, and the last one's images."""
        drawn: list[Tensor] = []
        times = [seconds(lambda: drawn.append(self.draw(size)), self.device) for _ in range(runs)]
        return [time / self.at_once for time in times], drawn[-1]

    def _random_prompt(self, unet: Any) -> dict[str, Tensor]:
        noise = lambda *shape: PROMPT_NOISE * torch.randn(shape, device=self.device, dtype=self.dtype)  # noqa: E731
        names = ("prompt_embeds", "negative_prompt_embeds")
        prompt = {name: noise(1, 77, unet.config.cross_attention_dim) for name in names}
        if unet.config.addition_embed_type == "text_time":
            width = pooled_width(unet.config)
            prompt |= {name.replace("prompt", "pooled_prompt"): noise(1, width) for name in names}
        return prompt


def pipeline(unet: Any, vae: Any) -> Any:
    """A text-to-image pipeline of these, which takes embeddings in place of a prompt."""
    from diffusers import EulerDiscreteScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline

    scheduler = EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1, timestep_spacing="leading"
    )
    parts: dict[str, Any] = {"unet": unet, "vae": vae, "scheduler": scheduler, "text_encoder": None, "tokenizer": None}
    if unet.config.addition_embed_type == "text_time":
        vae.config.force_upcast = False
        pipe: Any = StableDiffusionXLPipeline(**parts, text_encoder_2=None, tokenizer_2=None, add_watermarker=False)
    else:
        pipe = StableDiffusionPipeline(
            **parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False
        )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def images(model: str, options: argparse.Namespace, device: torch.device) -> Iterator[ImageRow]:
    """Medians of up to MOST_RUNS images at the first size, one pipeline after the other on the same weights."""
    size = sizes_for(model, options.sizes)[0]
    runs = max(1, min(options.runs or MOST_RUNS, MOST_RUNS))
    drawing = Images(model, options, device, options.at_once, options.text_encoders)
    drawing.draw(size)
    times, expected = drawing.timed(size, runs)
    host = statistics.median(times)
    yield ImageRow(model, name_of(size), HOST, host, 1.0, times=times)
    for name in options.settings or TIMED:
        compile_pipe(drawing.pipe, **IMAGE_SETTINGS[name])
        drawing.make_ready(size)
        times, output = drawing.timed(size, runs)
        difference = (output - expected).abs().float()
        route = runtime.status()["route"] or ""
        uncompile_pipe(drawing.pipe)
        yield ImageRow(
            model, name_of(size), name, statistics.median(times), host / statistics.median(times),
            float(difference.mean()), float(difference.max()), route, times,
        )
    give_back_memory()

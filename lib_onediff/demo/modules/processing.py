"""A generation: its parameters, the loop over its batches, and the hooks that scripts have in it."""
from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import generation, images, prompts
from . import devices, shared
from .infotext_utils import quote


def get_fixed_seed(seed: Any) -> int:
    """seed as an int; a random one for -1, None and the empty text."""
    if seed in ("", None, -1):
        return random.SystemRandom().randrange(2**32)
    return int(seed)


@dataclass(repr=False)
class StableDiffusionProcessing:
    """What is common to txt2img and img2img; the names are A1111's."""

    sd_model: Any = None
    prompt: str = ""
    negative_prompt: str = ""
    seed: int = -1
    subseed: int = -1
    subseed_strength: float = 0
    sampler_name: str = "Euler a"
    scheduler: str = "Automatic"
    batch_size: int = 1
    n_iter: int = 1
    steps: int = 20
    cfg_scale: float = 7.0
    width: int = 512
    height: int = 512
    do_not_save_samples: bool = False
    extra_generation_params: dict[str, Any] = field(default_factory=dict)
    denoising_strength: float | None = None
    override_settings: dict[str, Any] = field(default_factory=dict)
    override_settings_restore_afterwards: bool = True

    scripts: Any = field(default=None, init=False)
    script_args: tuple = field(default=(), init=False)
    comments: dict[str, int] = field(default_factory=dict, init=False)
    iteration: int = field(default=0, init=False)
    all_prompts: list[str] = field(default_factory=list, init=False)
    all_negative_prompts: list[str] = field(default_factory=list, init=False)
    all_seeds: list[int] = field(default_factory=list, init=False)
    all_subseeds: list[int] = field(default_factory=list, init=False)
    prompts: list[str] = field(default_factory=list, init=False)
    negative_prompts: list[str] = field(default_factory=list, init=False)
    seeds: list[int] = field(default_factory=list, init=False)
    subseeds: list[int] = field(default_factory=list, init=False)
    c: Any = field(default=None, init=False)
    uc: Any = field(default=None, init=False)
    is_hr_pass: bool = field(default=False, init=False)
    # The diffusers scheduler, once the pipeline runs.
    sampler: Any = field(default=None, init=False)
    # The diffusers pipeline, likewise.
    pipeline: Any = field(default=None, init=False)

    def comment(self, text: str) -> None:
        """A remark that is shown under the images."""
        self.comments[text] = 1

    def init(self, all_prompts: list[str], all_seeds: list[int], all_subseeds: list[int]) -> None:
        """Prepare what all batches share."""

    def setup_conds(self) -> bool:
        """Encode the prompts of the batch into c and uc; False where the user has interrupted that."""
        encoded = prompts.encode(
            self.sd_model.pipeline, self.prompts, self.negative_prompts, lambda: shared.state.interrupted
        )
        self.c, self.uc = encoded or (None, None)
        return encoded is not None

    def sample(
        self, conditioning: Any, unconditional_conditioning: Any, seeds: list[int], subseeds: list[int],
        subseed_strength: float, prompts: list[str],
    ) -> Tensor:
        """Run the sampler: latents (batch, 4, height / 8, width / 8)."""
        raise NotImplementedError

    def announce_sampling(self, noise: Tensor, x: Tensor) -> None:
        """Tell the scripts that the sampler runs next."""
        if self.scripts is not None:
            self.scripts.process_before_every_sampling(self, x=x, noise=noise, c=self.c, uc=self.uc)

    def close(self) -> None:
        """Let go of what the generation computed."""
        self.c = self.uc = None


@dataclass(repr=False)
class StableDiffusionProcessingTxt2Img(StableDiffusionProcessing):
    """A generation from text."""

    def sample(self, conditioning, unconditional_conditioning, seeds, subseeds, subseed_strength, prompts) -> Tensor:
        generators = generation.generators(seeds)
        noise = generation.noise(self, generators)
        self.announce_sampling(noise, noise)
        return generation.from_text(self, conditioning, unconditional_conditioning, noise, generators)


@dataclass(repr=False)
class StableDiffusionProcessingImg2Img(StableDiffusionProcessing):
    """A generation from an image: init_images are PIL images, mask a PIL image that is white where to repaint."""

    init_images: list[Any] | None = None
    resize_mode: int = 0
    mask: Any = None
    mask_blur: int = 4
    inpainting_mask_invert: int = 0

    def init(self, all_prompts: list[str], all_seeds: list[int], all_subseeds: list[int]) -> None:
        given, self.init_images = list(self.init_images or ()), []
        while given:
            # One after the other: their pixels are read now, and let go of.
            self.init_images.append(images.fit_image(given.pop(0), self.width, self.height, self.resize_mode))
        if self.mask is not None:
            self.mask = images.fit_mask(self)
            self.extra_generation_params["Mask blur"] = self.mask_blur
        self.extra_generation_params["Denoising strength"] = self.denoising_strength

    def sample(self, conditioning, unconditional_conditioning, seeds, subseeds, subseed_strength, prompts) -> Tensor:
        generators = generation.generators(seeds)
        noise = generation.noise(self, generation.generators(seeds))
        self.announce_sampling(noise, noise)
        return generation.from_image(self, conditioning, unconditional_conditioning, generators)


def process_images(p: StableDiffusionProcessing) -> Processed:
    """Make the images of p, with its option overrides in force; the options are restored afterwards.

    The caller holds call_queue.queue_lock. Without a model of its own, p takes the loaded one.
    """
    if p.sd_model is None:
        p.sd_model = shared.sd_model
    with overridden_options(p):
        return process_images_inner(p)


@contextlib.contextmanager
def overridden_options(p: StableDiffusionProcessing) -> Iterator[None]:
    """Have the options that p overrides in force, until it is over or, where it asks for that, until they are set."""
    opts = shared.opts
    before = opts.overrides
    opts.overrides = {**before, **{
        key: value for key, value in p.override_settings.items()
        if key in opts.data_labels and not opts.data_labels[key].do_not_save
    }}
    try:
        yield
    finally:
        if p.override_settings_restore_afterwards:
            opts.overrides = before


def process_images_inner(p: StableDiffusionProcessing) -> Processed:
    """The loop over the batches. Raises devices.NansException when the model produces no numbers."""
    count = p.batch_size * p.n_iter
    seed, subseed = get_fixed_seed(p.seed), get_fixed_seed(p.subseed)
    p.all_prompts, p.all_negative_prompts = [p.prompt] * count, [p.negative_prompt] * count
    p.all_seeds = [seed + index for index in range(count)]
    p.all_subseeds = [subseed + index for index in range(count)]
    if p.scripts is not None:
        p.scripts.process(p)
    p.init(p.all_prompts, p.all_seeds, p.all_subseeds)

    shared.state.job_count = p.n_iter
    images, infotexts = [], []
    for iteration in range(p.n_iter):
        p.iteration = iteration
        if shared.state.interrupted or shared.state.stopping_generation:
            break
        shared.state.skipped = False
        if p.n_iter > 1:
            shared.state.job = f"Batch {p.iteration + 1} out of {p.n_iter}"
        for index, image in enumerate(process_batch(p)):
            infotexts.append(create_infotext(p, index))
            image.info["parameters"] = infotexts[-1]
            images.append(image)
        shared.state.nextjob()

    if images and shared.state.interrupted:
        p.comment("Interrupted: the last image is unfinished.")
    processed = Processed(p, images, infotexts)
    if p.scripts is not None:
        p.scripts.postprocess(p, processed)
    return processed


def process_batch(p: StableDiffusionProcessing) -> list[Any]:
    """The images of one batch (PIL images); none where the user has interrupted it before its sampling."""
    first, last = p.iteration * p.batch_size, (p.iteration + 1) * p.batch_size
    p.prompts, p.negative_prompts = p.all_prompts[first:last], p.all_negative_prompts[first:last]
    p.seeds, p.subseeds = p.all_seeds[first:last], p.all_subseeds[first:last]
    with torch.no_grad():
        if not p.setup_conds():
            return []
        samples = p.sample(p.c, p.uc, p.seeds, p.subseeds, p.subseed_strength, p.prompts)
        devices.test_for_nans(samples, "unet")
        decoded = generation.decode(p.sd_model, samples)
        devices.test_for_nans(decoded, "vae")
    return [generation.to_image(p, pixels) for pixels in decoded]


class Processed:
    """Images and everything that says how they were made."""

    def __init__(self, p: StableDiffusionProcessing, images: list[Any], infotexts: list[str]) -> None:
        self.images = images
        self.infotexts = infotexts or [""]
        self.info = self.infotexts[0]
        self.seed, self.subseed = p.all_seeds[0], p.all_subseeds[0]
        self.comments = "\n".join(p.comments)
        self.prompt, self.negative_prompt = p.prompt, p.negative_prompt
        self.all_prompts, self.all_negative_prompts = p.all_prompts, p.all_negative_prompts
        self.all_seeds, self.all_subseeds = p.all_seeds, p.all_subseeds
        self.width, self.height = p.width, p.height
        self.sampler_name, self.cfg_scale, self.steps = p.sampler_name, p.cfg_scale, p.steps
        self.batch_size = p.batch_size
        self.sd_model_name = p.sd_model.name
        self.sd_model_hash = p.sd_model.sd_model_hash
        self.denoising_strength = p.denoising_strength
        self.extra_generation_params = p.extra_generation_params
        self.job_timestamp = shared.state.job_timestamp
        self.index_of_first_image = 0
        self.subseed_strength = p.subseed_strength

    def js(self) -> str:
        """The result without its images as JSON, as the API's `info`."""
        shown = {name: value for name, value in vars(self).items() if name not in ("images", "info")}
        return json.dumps(shown, default=lambda value: None)


def create_infotext(p: StableDiffusionProcessing, index: int) -> str:
    """The infotext of one image of the batch."""
    parameters = {
        "Steps": p.steps,
        "Sampler": p.sampler_name,
        "Schedule type": p.scheduler,
        "CFG scale": p.cfg_scale,
        "Seed": p.seeds[index],
        "Size": f"{p.width}x{p.height}",
        "Model": p.sd_model.name,
        **p.extra_generation_params,
    }
    named = ", ".join(f"{name}: {quote(value)}" for name, value in parameters.items() if value is not None)
    negative = f"\nNegative prompt: {p.negative_prompts[index]}" if p.negative_prompts[index] else ""
    return f"{p.prompts[index]}{negative}\n{named}".strip()

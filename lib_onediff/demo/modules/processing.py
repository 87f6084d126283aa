"""Makes images as A1111's modules.processing does: a generation's parameters, the loop over its batches with the
scripts' hooks, samplers, and infotext (the text in an image that has its parameters), written and read.
"""
from __future__ import annotations

import contextlib
import html
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import gradio as gr
import torch
from PIL import Image
from torch import Tensor

from ...core.refusal import Refusal
from . import shared
from .scripts import ScriptRunner

# CLIP's tokens of a prompt, among them the begin and the end.
MOST_TOKENS = 77
# In characters. A tokenizer takes quadratic time for a long word.
LONGEST_PROMPT = 2000
# In characters: two prompts, and the parameters of many extensions.
LONGEST_INFOTEXT = 20_000
# A parameter's name in infotext, and a size.
NAME = re.compile(r"\w[\w \-/]+")
SIZE = re.compile(r"(\d{1,6})x(\d{1,6})")


@dataclass(repr=False)
class StableDiffusionProcessingTxt2Img:
    """A txt2img generation. The names are those of A1111.

    seed: of the first image; the next images have the next numbers. -1: a random one.
    scripts, script_args: the ScriptRunner and the arguments of its scripts; set by the caller of process_images.
    comments: see comment. all_seeds: of all images; seeds: of the batch in progress; set by process_images.
    """

    sd_model: Any = None
    prompt: str = ""
    negative_prompt: str = ""
    seed: int = -1
    sampler_name: str = "Euler a"
    scheduler: str = "Automatic"
    batch_size: int = 1
    n_iter: int = 1
    steps: int = 20
    cfg_scale: float = 7.0
    width: int = 512
    height: int = 512
    extra_generation_params: dict[str, Any] = field(default_factory=dict)
    # Callers of this API may pass these; the demo saves no images, and overrides no settings.
    do_not_save_samples: bool = True
    override_settings: dict[str, Any] = field(default_factory=dict)

    scripts: Any = field(default_factory=ScriptRunner, init=False)
    script_args: tuple = field(default=(), init=False)
    comments: dict[str, int] = field(default_factory=dict, init=False)
    all_seeds: list[int] = field(default_factory=list, init=False)
    seeds: list[int] = field(default_factory=list, init=False)
    # The diffusers pipeline and its scheduler, once the sampling begins.
    pipeline: Any = field(default=None, init=False)
    sampler: Any = field(default=None, init=False)

    def comment(self, text: str) -> None:
        """Add a remark for the user that is shown under the images; a remark that is given twice is shown once."""
        self.comments[text] = 1

    def sample(self) -> Tensor:
        """The latents of one batch, (batch, channels, height / 8, width / 8), computed by the model's pipeline; one
        image for each of self.seeds, which the caller sets. Sets pipeline and sampler, and calls the scripts' hook
        process_before_every_sampling. Raises Refusal, for users, for an unknown sampler, or a model that needs a mask.

        Noise is drawn on the CPU for each image by itself, so that a seed has the same noise on every device and in any
        batch.
        """
        count = len(self.seeds)
        pipeline = self.sd_model.text_pipeline
        # text_pipeline is a copy with the same parts; sd_model.pipeline keeps the scheduler that the model came with.
        pipeline.scheduler = make_scheduler(self.sampler_name, self.sd_model.pipeline.scheduler, self.seeds)
        self.pipeline = pipeline
        self.sampler = pipeline.scheduler
        pipeline.set_progress_bar_config(disable=True)
        shared.state.sampling_step = 0
        shared.state.sampling_steps = self.steps
        self.scripts.in_generation("process_before_every_sampling", self)
        return pipeline(
            prompt=[self.prompt] * count, negative_prompt=[self.negative_prompt] * count, width=self.width,
            height=self.height, num_inference_steps=self.steps, guidance_scale=self.cfg_scale, output_type="latent",
            generator=[torch.Generator("cpu").manual_seed(seed) for seed in self.seeds], callback_on_step_end=note_step,
        ).images

    def close(self) -> None:
        """Drop the references to the pipeline and the scheduler, when the generation is done."""
        self.pipeline = self.sampler = None


@dataclass(frozen=True)
class Processed:
    """The result of a generation. images: fewer than wanted if it was interrupted. infotexts: one for each image; [""]
    without images. comments: remarks for users, a line for each."""

    images: list[Image.Image]
    infotexts: list[str]
    comments: str


def note_step(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """A callback that diffusers' pipelines call after each step: writes the step to shared.state, and makes the
    pipeline skip the remaining steps if the user has interrupted it. Returns `tensors` unchanged."""
    state = shared.state
    state.sampling_step = step + 1
    state.sampling_steps = pipeline.num_timesteps
    if state.interrupted:
        pipeline._interrupt = True
    return tensors


def check_numbers(network: str, values: Tensor) -> None:
    """Raise Refusal, for users, if a network's output (values) has NaN or infinity. network: its name in the message.
    """
    if not torch.isfinite(values).all():
        raise Refusal(
            f"The {network} produced numbers that are not finite (NaN or infinity), so there is no image. "
            "The model file may be damaged, or the model may need a higher precision than this page uses."
        )


def process_images(p: StableDiffusionProcessingTxt2Img) -> Processed:
    """Make all images of p, batch after batch, and call the scripts' hooks. The caller must hold call_queue.queue_lock.
    If the user interrupts it, the images so far are returned, the last batch after fewer steps. If p has no model, the
    loaded one is used. Raises Refusal, for users, for wrong parameters and for images with NaN or infinity."""
    p.sd_model = p.sd_model or shared.sd_model
    for name, side in (("width", p.width), ("height", p.height)):
        if side % p.sd_model.side_step:
            raise Refusal(f"{name} is {side}; it must be a multiple of {p.sd_model.side_step}.")
    if max(len(p.prompt), len(p.negative_prompt)) > LONGEST_PROMPT:
        raise Refusal(f"The prompt and the negative prompt must have {LONGEST_PROMPT} characters at most each.")
    seed = random.SystemRandom().randrange(2**32) if p.seed == -1 else p.seed
    p.all_seeds = [seed + index for index in range(p.batch_size * p.n_iter)]
    p.scripts.in_generation("process", p)

    shared.state.job_count = p.n_iter
    made = []
    infotexts = []
    for batch in range(p.n_iter):
        if shared.state.interrupted:
            break
        p.seeds = p.all_seeds[batch * p.batch_size : (batch + 1) * p.batch_size]
        with torch.no_grad():
            samples = p.sample()
            check_numbers("network", samples)
            pixels = p.sd_model.decode(samples)
            check_numbers("VAE", pixels)
        p.scripts.in_generation("postprocess_batch", p)
        for one, seed in zip(pixels, p.seeds, strict=True):
            image = Image.fromarray((one * 255).round().to(torch.uint8).permute(1, 2, 0).numpy())
            infotexts.append(create_infotext(p, seed))
            image.info["parameters"] = infotexts[-1]
            made.append(image)
        shared.state.job_no = batch + 1
        shared.state.sampling_step = 0

    if made and shared.state.interrupted:
        p.comment("Interrupted: the last image is unfinished.")
    tokenizer = p.sd_model.pipeline.tokenizer or p.sd_model.pipeline.tokenizer_2
    if len(tokenizer(p.prompt, verbose=False).input_ids) > MOST_TOKENS:
        p.comment("The prompt is longer than 75 tokens; the rest was left out.")
    processed = Processed(made, infotexts or [""], "\n".join(p.comments))
    p.scripts.in_generation("postprocess", p, processed)
    return processed


# --- samplers: A1111's names, each with the noise schedule of "Automatic" there ---------------------------------------


MULTISTEP = "DPMSolverMultistepScheduler"
KARRAS = {"use_karras_sigmas": True}
# The class in diffusers, and its arguments, by the sampler's name.
SAMPLERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Euler": ("EulerDiscreteScheduler", {}),
    "Euler a": ("EulerAncestralDiscreteScheduler", {}),
    "DPM++ 2M": (MULTISTEP, {"algorithm_type": "dpmsolver++", **KARRAS}),
    "DPM++ SDE": ("DPMSolverSDEScheduler", KARRAS),
    "DPM++ 2M SDE": (MULTISTEP, {"algorithm_type": "sde-dpmsolver++", **KARRAS}),
    "LMS": ("LMSDiscreteScheduler", {}),
    "Heun": ("HeunDiscreteScheduler", {}),
    "DDIM": ("DDIMScheduler", {}),
    "PLMS": ("PNDMScheduler", {"skip_prk_steps": True}),
    "UniPC": ("UniPCMultistepScheduler", {}),
    "LCM": ("LCMScheduler", {}),
}


# For models that were trained by flow matching.
FLOW_SAMPLERS: dict[str, tuple[str, dict[str, Any]]] = {"Euler": ("FlowMatchEulerDiscreteScheduler", {})}


def samplers_of(base: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """The samplers that a model can use, as SAMPLERS or FLOW_SAMPLERS. base: the scheduler that the model came with."""
    return FLOW_SAMPLERS if type(base).__name__.startswith("FlowMatch") else SAMPLERS


def make_scheduler(name: str, base: Any, seeds: list[int]) -> Any:
    """A new diffusers scheduler for a sampler, with the model's training schedule and prediction type.

    name: the sampler's, as in SAMPLERS. base: the scheduler that the model came with. seeds: one for each image of the
    batch. Raises Refusal, for users, if there is no such sampler for this model.
    """
    import diffusers

    known = samplers_of(base)
    if name not in known:
        raise Refusal(f"There is no sampler {name!r} for this model; choose from {', '.join(known)}.")
    scheduler, arguments = known[name]
    # from_config ignores arguments that a scheduler does not have; only DPM++ SDE has noise_sampler_seed.
    arguments = {"use_karras_sigmas": False, "noise_sampler_seed": seeds, **arguments}
    return getattr(diffusers, scheduler).from_config(base.config, **arguments)


# --- infotext ---------------------------------------------------------------------------------------------------------


def create_infotext(p: StableDiffusionProcessingTxt2Img, seed: int) -> str:
    """The infotext of one of p's images: prompts and parameters, as A1111 writes them. seed: the image's own."""
    parameters = {
        "Steps": p.steps, "Sampler": p.sampler_name, "Schedule type": p.scheduler, "CFG scale": p.cfg_scale,
        "Seed": seed, "Size": f"{p.width}x{p.height}", "Model": p.sd_model.name, **p.extra_generation_params,
    }
    named = ", ".join(f"{name}: {quote(value)}" for name, value in parameters.items() if value is not None)
    negative = f"\nNegative prompt: {p.negative_prompt}" if p.negative_prompt else ""
    return f"{p.prompt}{negative}\n{named}".strip()


def quote(text: Any) -> Any:
    """A value in the form for infotext: as JSON if its text has a comma, a colon or a line break, otherwise unchanged.
    """
    if any(mark in str(text) for mark in ",\n:"):
        return json.dumps(text, ensure_ascii=False)
    return text


def parse_generation_parameters(infotext: str) -> dict[str, Any]:
    """The parameters in an infotext, by name: always "Prompt" and "Negative prompt" ("" for none), and the named values
    of its last line, as texts without quotes. A last line with fewer than three named values belongs to the prompts. A
    size such as "Size: 512x768" becomes "Size-1" and "Size-2". Raises Refusal, for users, if the text is too long."""
    if len(infotext) > LONGEST_INFOTEXT:
        raise Refusal(f"This text is too long to be read: infotext has {LONGEST_INFOTEXT} characters at most.")
    *lines, last = infotext.strip().split("\n")
    named = named_values(last)
    if len(named) < 3:
        lines = [*lines, last]
        named = []
    prompt, _, negative = "\n".join(lines).partition("Negative prompt:")
    result: dict[str, Any] = {"Prompt": prompt.strip(), "Negative prompt": negative.strip()}
    for name, value in named:
        if value.startswith('"'):
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(value)
        size = SIZE.fullmatch(str(value))
        result.update(zip((f"{name}-1", f"{name}-2"), size.groups(), strict=True) if size else {name: value})
    return result


def named_values(line: str) -> list[tuple[str, str]]:
    """(name, value) for each "name: value" in a line, separated by commas; other parts are left out. A comma in quotes
    belongs to the value, which keeps its quotes."""
    found = []
    for part in parts_between_commas(line):
        name, colon, value = part.partition(":")
        if colon and NAME.fullmatch(name.strip()):
            found.append((name.strip(), value.strip()))
    return found


def parts_between_commas(line: str) -> Iterator[str]:
    """The parts of a line that commas outside of quotes separate. Takes linear time; a regular expression for quoted
    texts takes quadratic time if quotes are not closed."""
    begin = 0
    is_quoted = False
    is_escaped = False
    for index, letter in enumerate(line):
        if letter == "," and not is_quoted:
            yield line[begin:index]
            begin = index + 1
        elif letter == '"' and not is_escaped:
            is_quoted = not is_quoted
        is_escaped = letter == "\\" and is_quoted and not is_escaped
    yield line[begin:]


def connect_paste(button: Any, fields: list[Any], text: Any) -> None:
    """Make a button fill components from the infotext in the component `text`.

    fields: pairs of a component and its source: the name of an infotext parameter, or a function that takes all
    parameters and returns the value. A component whose value is missing (None) or wrong stays as it is; the page shows
    a warning for wrong values. If the infotext is too long, all components stay, and the page shows a warning.
    """
    def paste(infotext: str) -> list[Any]:
        """The new values of the components, in the order of `fields`."""
        try:
            parameters = parse_generation_parameters(infotext or "")
        except Refusal as refusal:
            gr.Warning(html.escape(str(refusal)))
            return [gr.update() for _ in fields]
        updates = []
        problems = []
        for component, target in fields:
            value = target(parameters) if callable(target) else parameters.get(target)
            try:
                updates.append(gr.update() if value is None else gr.update(value=as_in(component, value)))
            except Refusal as refusal:
                problems.append(str(refusal))
                updates.append(gr.update())
        if problems:
            gr.Warning(html.escape(" ".join(problems)))
        return updates

    button.click(
        paste, inputs=[text], outputs=[component for component, _ in fields], show_progress="hidden",
        api_visibility="private",
    )


def as_in(component: Any, value: Any) -> Any:
    """A value from infotext in the form for a component: a float for a slider or number field, otherwise unchanged.
    Raises Refusal, for users, if the value is none of a list's choices, or is not a number within the slider's bounds.
    """
    if isinstance(component, gr.Dropdown) and not component.allow_custom_value:
        known = [choice for _, choice in component.choices]
        if value not in known:
            raise Refusal(f"{component.label}: {value!r} is not a choice here; the value on the page stays.")
    if not isinstance(component.value, (int, float)) or isinstance(value, bool):
        return value
    try:
        number = float(value)
    except ValueError:
        raise Refusal(f"{component.label}: {value!r} is not a number; the value on the page stays.") from None
    least = component.minimum
    most = component.maximum
    if not least <= number <= most:
        raise Refusal(
            f"{component.label} must be from {least} to {most}, not {number:g}; the value on the page stays."
        )
    return number

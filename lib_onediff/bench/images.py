"""Measures whole images: time and difference with a pipeline, quality with trained weights, and time in a WebUI."""
from __future__ import annotations

import argparse
import json
import statistics
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor

from ..core.quality import compare
from ..core.sizes import Size
from ..demo import EMOJI_DIT, SHIPPED, SHIPPED_CFG_SCALE
from ..public import compile_pipe, load_folder, network_of, uncompile_pipe
from ..runtime.runtime import runtime
from ..runtime.verify import relative_error
from . import models
from .judge import Judge, load_judge
from .sheet import SheetRow, sheet
from .steps import DTYPES, HOST, Options, Row, free_memory, name_of_options, served_by, sizes_of, timed

# Measuring, checking and capturing are done after so many images as a warm-up, and then so many usual ones.
WAITING_IMAGES = 2
SETTLING_IMAGES = 1
ONEDIFF = "onediff"
TOKENS = 77
# The standard deviation of random prompt embeddings, which is smaller than noise's 1.
PROMPT_NOISE = 0.1
PROMPT = "a lighthouse at night"
Drawn = TypeVar("Drawn")


class Drawing:
    """Makes images with a diffusers pipeline on a device, always of the same prompt and random numbers.

    pipe: the pipeline; whether OneDiff serves it is up to the caller (compile_pipe).
    """

    def __init__(self, model: str, dtype: torch.dtype, device: torch.device) -> None:
        """model: a name in models.CONFIGURATIONS, for random weights, or a diffusers folder. Raises Refusal if the
        folder cannot be loaded."""
        self.device = device
        if model not in models.CONFIGURATIONS:
            self.pipe = load_pipeline(Path(model), dtype, device)
            self._prompt = {"prompt": PROMPT}
            return
        unet: Any = models.random_unet(model, device).to(dtype)
        self.pipe = random_pipeline(unet, models.random_vae(model.startswith("tiny"), device).to(dtype))
        self._prompt = random_prompt(unet)

    def draw(self, size: Size, steps: int, batch: int = 1) -> Tensor:
        """A batch of images in one call, (batch, 3, height, width), from 0 to 1. steps: sampling steps."""
        return self.pipe(
            **self._prompt, width=size.width, height=size.height, num_inference_steps=steps, guidance_scale=5.0,
            generator=torch.Generator("cpu").manual_seed(0), output_type="pt", num_images_per_prompt=batch,
        ).images

    def times(self, size: Size, steps: int, batch: int, runs: int) -> tuple[list[float], Tensor]:
        """(the seconds for one image in each of `runs` timed calls of draw(): a call's time divided by `batch`; the
        images of the last call). Before these, calls that are not timed let OneDiff measure, check and capture.
        steps: sampling steps of an image."""
        with runtime.warming_up():
            for _ in range(WAITING_IMAGES):
                self.draw(size, steps, batch)
        for _ in range(SETTLING_IMAGES):
            self.draw(size, steps, batch)
        drawn = [timed(lambda: self.draw(size, steps, batch), self.device) for _ in range(runs)]
        return [seconds / batch for _, seconds in drawn], drawn[-1][0]


def random_pipeline(unet: Any, vae: Any) -> Any:
    """A text-to-image pipeline, of SDXL or SD1.5, with this UNet and VAE. It has no text encoder, and takes embeddings
    instead of a prompt; see random_prompt."""
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


def random_prompt(unet: Any) -> dict[str, Any]:
    """Random embeddings of a prompt and a negative prompt, as arguments of the pipeline."""
    widths: dict[str, tuple[int, ...]] = {"prompt_embeds": (TOKENS, unet.config.cross_attention_dim)}
    if unet.config.addition_embed_type == "text_time":
        widths["pooled_prompt_embeds"] = (models.pooled_width(unet.config),)
    return {
        sign + name: PROMPT_NOISE * torch.randn(1, *width, device=unet.device, dtype=unet.dtype)
        for sign in ("", "negative_") for name, width in widths.items()
    }


def load_model(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """The pipeline of the shipped model, if `name` is "emoji-sd", or of a diffusers folder; see load_pipeline."""
    return load_pipeline(SHIPPED if name == SHIPPED.name else Path(name), dtype, device)


def load_pipeline(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The pipeline of a diffusers folder, with the Euler scheduler, on a device. A folder named emoji-dit is
    not read: for it, the demo's own pipeline with the shipped transformer is returned, with its own scheduler. Raises
    Refusal if the folder cannot be loaded."""
    from diffusers import EulerDiscreteScheduler

    if folder.name == EMOJI_DIT.name:
        from ..demo.flow_pipeline import load_emoji_dit

        flow = load_emoji_dit(dtype).to(device)
        flow.set_progress_bar_config(disable=True)
        return flow
    pipe = load_folder(folder, dtype).to(device)
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def image(options: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """The rows of the command `image`, for every model, size and batch: the time of diffusers' own image, and the time
    and difference of OneDiff's with default options and with each --set, with the same weights."""
    for model in options.model:
        drawing = Drawing(model, DTYPES[options.dtype], device)
        for size in sizes_of(model, options):
            for batch in options.batch:
                case = {"model": model, "size": size.resolution, "at_once": batch}
                times, expected = drawing.times(size, options.steps, batch, options.runs)
                host = statistics.median(times)
                yield {**case, "options": HOST, "image_s": host, "all_s": times}
                draw = partial(drawing.times, size, options.steps, batch, options.runs)
                for row, (times, images) in by_onediff(drawing.pipe, options.set, draw):
                    median = statistics.median(times)
                    yield {
                        **case, **row, "image_s": median, "x_host": host / median,
                        "relative_error": relative_error(images, expected), "all_s": times,
                    }
        del drawing
        free_memory()


def by_onediff(
    pipe: Any, chosen: list[Options], draw: Callable[[], Drawn],
) -> Iterator[tuple[Row, Drawn]]:
    """(part of a row, result of draw()) with OneDiff's default options, then with each of the chosen ones. The part has
    the options as text ("options": ONEDIFF for the defaults) and how OneDiff served the last call ("served_by"). After
    each draw(), the pipeline is diffusers' own again."""
    for options in ({}, *chosen):
        compile_pipe(pipe, **options)
        drawn = draw()
        row = {"options": name_of_options(options) or ONEDIFF, "served_by": served_by()}
        uncompile_pipe(pipe)
        yield row, drawn


# --- quality ----------------------------------------------------------------------------------------------------------

# Prompts that emoji-sd and emoji-dit were not trained on, each with the emoji to show.
PROMPTS = Path(__file__).with_name("prompts.json")
JUDGE = SHIPPED.with_name("emoji-judge.safetensors")
HOST32 = "host, fp32"
ANOTHER = "another prompt's image"
# The width and height of an image in pixels, and how many of these a latent has for one.
SIDE = 256
REDUCTION = 8
IMAGES_AT_ONCE = 8
# The number of prompts on the sheet of --picture.
SHOWN = 4
# psnr_lowest_5 is this quantile: a fault shows in the worst images, and a single one may be an accident.
LOWEST = 0.05


def held_out(count: int) -> list[Row]:
    """`count` prompts of PROMPTS, as {"prompt", "shows": emoji names, "seed"}. The seed is 0; if PROMPTS has fewer,
    they are repeated with seed 1, then 2 and so on."""
    known = json.loads(PROMPTS.read_text(encoding="utf-8"))
    return [{**known[number % len(known)], "seed": number // len(known)} for number in range(count)]


def draw(
    pipe: Any, wanted: list[Row], steps: int, guidance: float = SHIPPED_CFG_SCALE, at_once: int = IMAGES_AT_ONCE,
) -> Tensor:
    """The images of these prompts, (n, 3, SIDE, SIDE) of float32 from 0 to 1. wanted: see held_out. steps: sampling
    steps of an image. guidance: the CFG scale. at_once: the number of images of a call. The last call draws its last
    prompt several times if prompts are lacking, so that all calls have the same shape."""
    parts = []
    at_once = min(at_once, len(wanted))
    network: Any = network_of(pipe)
    shape = network.config.in_channels, SIDE // REDUCTION, SIDE // REDUCTION
    for start in range(0, len(wanted), at_once):
        part = [wanted[min(start + at, len(wanted) - 1)] for at in range(at_once)]
        generators = [torch.Generator("cpu").manual_seed(each["seed"]) for each in part]
        noise = [torch.randn(shape, generator=one, dtype=torch.float32, device="cpu") for one in generators]
        images = pipe(
            [each["prompt"] for each in part], num_inference_steps=steps, guidance_scale=guidance, height=SIDE,
            width=SIDE, output_type="pt", latents=torch.stack(noise).to(pipe.device, network.dtype),
        ).images
        parts.append(images.float().clamp(0, 1))
    return torch.cat(parts)[: len(wanted)]


def draw_prompts(pipe: Any, wanted: list[Row], steps: int, guidance: float = SHIPPED_CFG_SCALE) -> Tensor:
    """The images of draw(), rounded as for a file: (n, 3, SIDE, SIDE) of uint8 on the CPU."""
    return (draw(pipe, wanted, steps, guidance) * 255).round().to(torch.uint8).cpu()


def draw_ready(pipe: Any, wanted: list[Row], steps: int, guidance: float) -> Tensor:
    """The images of draw_prompts(). Before, the first batch is drawn once more than needed, so that OneDiff measures,
    checks and captures in it."""
    with runtime.warming_up():
        draw_prompts(pipe, wanted[:IMAGES_AT_ONCE], steps, guidance)
    return draw_prompts(pipe, wanted, steps, guidance)


def quality(options: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """The rows of the command `quality`: how far images are from diffusers' own in float32. The rows are float32
    itself, another prompt's images (the scale for the rest), diffusers in --dtype (unless that is float32), OneDiff,
    and OneDiff with each --set. With --picture, writes a sheet of the first images of each --set below float32's.

    Only the first of --model is measured. A --set with Low-bit computes every layer in eight bits, also those in which
    that gains no time. Raises Refusal if the model cannot be loaded, or the sheet cannot be drawn."""
    model = (options.model or [SHIPPED.name])[0]
    wanted = held_out(options.images)
    sampling = options.steps, options.guidance
    exact = draw_prompts(load_model(model, torch.float32, device), wanted, *sampling)
    judge = partial(judged, load_judge(JUDGE, device), exact=exact, wanted=wanted)
    shown = [SheetRow("Exact", ["diffusers, float32"], pictures_of(exact))]
    yield {"options": HOST32, **judge(exact)}
    yield {"options": ANOTHER, **judge(exact.roll(1, 0))}
    pipe = load_model(model, DTYPES[options.dtype], device)
    if DTYPES[options.dtype] is not torch.float32:
        yield {"options": f"{HOST}, {options.dtype}", **judge(draw_prompts(pipe, wanted, *sampling))}
    # This model is too small to be faster in eight bits. Its images show their effect if every layer uses them.
    with runtime.devices.lossy.low_bit.every_layer_quantized():
        for row, images in by_onediff(pipe, options.set, partial(draw_ready, pipe, wanted, *sampling)):
            measured = judge(images)
            yield {**row, **measured}
            if row["options"] != ONEDIFF:
                facts = f"{measured['psnr_db']:.1f} dB", f"lowest 5 %: {measured['psnr_lowest_5']:.1f} dB"
                shown.append(SheetRow(row["options"], facts, pictures_of(images)))
    if options.picture:
        settings = (
            f"{Path(model).name}, {options.dtype}, Euler, {options.steps} steps, CFG {options.guidance:g}, "
            f"{SIDE}x{SIDE}; PSNR of {len(wanted)} prompts"
        )
        sheet(shown, [each["prompt"] for each in wanted[:SHOWN]], settings).save(options.picture, quality=92)


def pictures_of(images: Tensor) -> list[Image.Image]:
    """The first SHOWN of these images as Pillow's. images: (n, 3, height, width) of uint8 on the CPU."""
    return [Image.fromarray(each.permute(1, 2, 0).numpy()) for each in images[:SHOWN]]


def judged(judge: Judge, images: Tensor, exact: Tensor, wanted: list[Row]) -> Row:
    """A part of a row: how far images are from the exact ones. images, exact: (n, 3, height, width) of uint8.

    wanted: the prompts of the images; see held_out. psnr_db: the median in decibels, infinite for equal images.
    psnr_lowest_5: the 5 % quantile. ssim, distance (Judge.distance): means. relative_error: of all images together.
    recognised: the share of images, from 0 to 1, in which the emoji that the judge finds most likely are exactly those
    of the prompt.
    """
    found = list(map(compare, exact, images))
    psnr = sorted(each.psnr for each in found)
    distances = []
    hits = []
    # One image at a time, because all together would need gigabytes.
    for image, other, case in zip(images[:, None], exact[:, None], wanted, strict=True):
        distances.append(float(judge.distance(image, other)))
        likely = judge(image)[0].topk(len(case["shows"])).indices[0].tolist()
        hits.append({judge.names[index] for index in likely} == set(case["shows"]))
    return {
        "relative_error": relative_error(images, exact), "psnr_db": psnr[len(psnr) // 2],
        "psnr_lowest_5": psnr[int(LOWEST * len(psnr))], "ssim": statistics.fmean(each.ssim for each in found),
        "distance": statistics.fmean(distances), "recognised": statistics.fmean(hits),
    }


# --- a WebUI ----------------------------------------------------------------------------------------------------------

STATUS = "/onediff/v1/status"
# The timeout of each request.
SECONDS_FOR_AN_IMAGE = 600
# The steps of an image that is made after each change of options, and is not timed.
STEPS_TO_SETTLE = 4


class WebUI:
    """The REST API of A1111, Forge or the demo, started with --api."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        # Without the environment's proxy, because the WebUI is on this machine or in its network.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def ask(self, path: str, body: Row | None = None) -> Any:
        """The WebUI's answer to a request, as parsed JSON. path: with the leading slash. body: posted as JSON; None for
        a GET request. Raises ValueError, with a sentence for users, if the WebUI cannot be reached or answers an
        error."""
        address = self.url + path
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
        try:
            with self._open(request, timeout=SECONDS_FOR_AN_IMAGE) as answer:
                return json.load(answer)
        except (OSError, ValueError) as problem:
            raise ValueError(f"{address}: {problem} (is it running, with --api, and with OneDiff?)") from problem

    def draw(self, size: Size, steps: int, arguments: list[Any], seed: int = 1) -> tuple[float, str, Counter[str]]:
        """(the seconds that one image takes, with the request; its file in base64; the number of its UNet calls by
        route ("graph", "host" and so on)). arguments: those of OneDiff's script in the WebUI, such as [False] for off.
        """
        body = {
            "prompt": PROMPT, "seed": seed, "steps": steps, "width": size.width, "height": size.height,
            "sampler_name": "Euler", "cfg_scale": 7.0, "save_images": False,
            "alwayson_scripts": {"OneDiff": {"args": arguments}},
        }
        before = Counter(self.ask(STATUS)["calls"])
        began = time.perf_counter()
        answer = self.ask("/sdapi/v1/txt2img", body)
        seconds = time.perf_counter() - began
        return seconds, answer["images"][0], Counter(self.ask(STATUS)["calls"]) - before


def webui(options: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """The rows of the command `webui`, for each size: times of a WebUI's images with OneDiff off, on, and on with each
    --set, made alternately. Raises ValueError, with a sentence for users, if the WebUI does not answer. device: unused.

    The time of a step is the difference between an image with twice the steps and one with the usual number, divided by
    that number; None if the times vary too much for it.
    """
    running = WebUI(options.url)
    steps = options.steps
    chosen: dict[str, Row] = {"off": {"enabled": False}, "on": {"enabled": True}}
    chosen |= {name_of_options(more): {"enabled": True, **more} for more in options.set}
    for size in options.size or [Size(512, 512)]:
        rows: dict[str, Row] = {name: {"all_s": [], "all_step_ms": [], "all_calls": Counter()} for name in chosen}
        for values in chosen.values():
            running.draw(size, steps, [values])
        for _ in range(options.runs):
            for values, row in zip(chosen.values(), rows.values(), strict=True):
                # The first image after a change moves weights and captures graphs again, so it is not timed.
                running.draw(size, STEPS_TO_SETTLE, [values])
                once, _, calls = running.draw(size, steps, [values])
                twice, _, more = running.draw(size, 2 * steps, [values])
                row["all_calls"] += calls + more
                row["all_s"].append(once)
                row["all_step_ms"].append((twice - once) / steps * 1e3)
        case = {"model": running.ask(STATUS)["model"] or "?", "size": size.resolution}
        for name, row in rows.items():
            image_s = statistics.median(row["all_s"])
            row["x_off"] = statistics.median(rows["off"]["all_s"]) / image_s
            # If the times of images vary by more than the additional steps take, the time of a step is unknown.
            step_ms = statistics.median(row["all_step_ms"]) if min(row["all_step_ms"]) > 0 else None
            routes = ", ".join(f"{count} {route}" for route, count in row["all_calls"].items())
            yield {**case, "options": name, "image_s": image_s, "step_ms": step_ms, "served_by": routes, **row}

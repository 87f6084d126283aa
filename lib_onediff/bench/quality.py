"""How far the images of each setting are from the host's in float32, and whether they still show their prompt.

A small model with trained weights draws them (demo/emoji-sd), and the judge that was trained beside it looks.
"""
from __future__ import annotations

import argparse
import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..demo import SHIPPED
from ..demo.errors import Refusal
from ..demo.model_folder import load_folder
from ..engines import LOW_BIT_BACKENDS, LOW_BIT_ONLY, WITHOUT_ATTENTION
from ..options.effects import why_no_effect
from ..public import compile_pipe, uncompile_pipe
from ..quality import compare
from ..quality.judge import Judge, load_judge, verdicts
from ..runtime.runtime import runtime
from .captions import held_out_captions
from .clock import give_back_memory
from .image_settings import IMAGE_SETTINGS
from .options import DTYPES

JUDGE = SHIPPED.with_name("emoji-judge.safetensors")
HOST32, HOST = "host, float32", "host"
# What no setting may come near: every image beside the one of the next prompt.
ANOTHER = "another prompt's image"
SIDE, GUIDANCE = 256, 4.0
AT_ONCE = 8
# A fault shows in the worst images, and one image is an accident.
LOW = 0.05
SHEET_ROWS, SHEET_SIDE = 8, 128
HEADINGS = (
    "setting", "PSNR, dB", "lowest 5 %", "SSIM", "distance", "recognised", "lightness", "contrast", "saturation",
    "paler", "note",
)


@dataclass(frozen=True)
class Case:
    """One image to draw, and what it has to show."""

    prompt: str
    seed: int
    names: tuple[str, ...]
    background: str


@dataclass
class QualityRow:
    """A setting's images against those of the host in float32.

    psnr, psnr_low, psnr_high: the median, and what 5 % are below and above, in decibels. ssim, distance: means; the
    distance is the judge's. verdicts: how many images Compare says what of.
    recognised: the share of images whose emoji the judge names. lightness in L*, contrast and saturation relative, each
    the mean change. paler: the share of images that lost colour or contrast beyond noise.
    """

    setting: str
    images: int
    recognised: float
    psnr: float = math.inf
    psnr_low: float = math.inf
    psnr_high: float = math.inf
    ssim: float = 1.0
    distance: float = 0.0
    lightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    paler: float = 0.0
    verdicts: dict[str, int] = field(default_factory=dict)
    note: str = ""

    def cells(self) -> list[str]:
        recognised = f"{100 * self.recognised:.1f} %"
        if self.setting == HOST32:
            return [self.setting, "", "", "", "", recognised, "", "", "", "", self.note]
        return [
            self.setting, f"{self.psnr:.1f}", f"{self.psnr_low:.1f}", f"{self.ssim:.4f}", f"{self.distance:.4f}",
            recognised, f"{self.lightness:+.2f}", f"{100 * self.contrast:+.1f} %",
            f"{100 * self.saturation:+.1f} %", f"{100 * self.paler:.1f} %", self.note,
        ]


def cases(number: int) -> list[Case]:
    """Held-out captions with seed 0, then with seed 1, and so on: the same in every run."""
    captions = held_out_captions()
    chosen = [(captions[at % len(captions)], at // len(captions)) for at in range(number)]
    return [Case(caption.prompt, seed, caption.names, caption.background) for caption, seed in chosen]


def quality(options: argparse.Namespace, device: torch.device) -> Iterator[QualityRow]:
    """A row for the host in float32, the host in --dtype, and every setting of --settings; then the sheet is written.

    Raises ValueError with a sentence if the model or the judge is missing.
    """
    folder = options.model or SHIPPED
    for needed in (folder / "model_index.json", options.judge or JUDGE):
        if not needed.is_file():
            raise ValueError(f"{needed} is not there; lib_onediff/demo/emoji-sd/README.md says how it is made")
    judge = load_judge(options.judge or JUDGE, device)
    wanted, steps = cases(options.quality), options.steps
    true = drawn(load(folder, torch.float32, device), wanted, steps)
    yield row(HOST32, true, true, wanted, judge, device)
    if len(true) > 1:
        yield row(ANOTHER, true.roll(1, 0), true, wanted, judge, device)
    pipe = load(folder, DTYPES[options.dtype], device)
    columns, names = [true[:SHEET_ROWS]], [HOST32]
    images = drawn(pipe, wanted, steps)
    yield row(HOST, images, true, wanted, judge, device)
    # This model is too small to gain by eight bits: what they do to its images is seen where every layer has them.
    with runtime.operators.low_bit.choice.used_everywhere():
        for name in options.settings or IMAGE_SETTINGS:
            choices = IMAGE_SETTINGS[name]
            compile_pipe(pipe, **choices)
            with runtime.wait_for_compile():
                drawn(pipe, wanted[:AT_ONCE], steps)
            images = drawn(pipe, wanted, steps)
            found = row(name, images, true, wanted, judge, device)
            found.note = note_of(choices, DTYPES[options.dtype])
            uncompile_pipe(pipe)
            columns.append(images[:SHEET_ROWS])
            names.append(f"{name}: {found.distance:.2f}")
            yield found
    give_back_memory()
    if options.sheet:
        write_sheet(options.sheet, columns, names, wanted)


def load(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from diffusers import EulerDiscreteScheduler

    try:
        pipe = load_folder(folder, dtype)
    except Refusal as problem:
        raise ValueError(str(problem)) from problem
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


def drawn(pipe: Any, wanted: list[Case], steps: int) -> Tensor:
    """(n, 3, SIDE, SIDE) of uint8, as a file would keep them. The last part is filled up, so that all are of one
    shape."""
    found = []
    at_once = min(AT_ONCE, len(wanted))
    for start in range(0, len(wanted), at_once):
        part = wanted[start : start + at_once]
        filled = part + part[:1] * (at_once - len(part))
        images = pipe(
            [case.prompt for case in filled], num_inference_steps=steps, guidance_scale=GUIDANCE, height=SIDE,
            width=SIDE, output_type="pt", latents=first_latents(pipe, [case.seed for case in filled]),
        ).images
        found.append((images[: len(part)].float().clamp(0, 1) * 255).round().to(torch.uint8).cpu())
    return torch.cat(found)


def first_latents(pipe: Any, seeds: list[int]) -> Tensor:
    """(n, channels, SIDE / 8, SIDE / 8) in the pipeline's dtype: the same noise in every one, which torch's generators
    do not give."""
    shape = pipe.unet.config.in_channels, SIDE // pipe.vae_scale_factor, SIDE // pipe.vae_scale_factor
    noise = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(noise).to(pipe.device, pipe.unet.dtype)


def row(
    setting: str, images: Tensor, true: Tensor, wanted: list[Case], judge: Judge, device: torch.device
) -> QualityRow:
    """A setting's numbers. images, true: (n, 3, SIDE, SIDE) of uint8, the setting's and the float32 host's."""
    floats, expected = (tensor.to(device).float() / 127.5 - 1 for tensor in (images, true))
    hits = [set(best[: len(case.names)]) == set(case.names)
            for (best, _), case in zip(verdicts(judge, floats), wanted, strict=True)]
    found = QualityRow(setting, len(images), statistics.fmean(hits))
    if images is true:
        return found
    # scikit-image takes 50 ms a pair, most of it outside Python: cores share it.
    with ThreadPoolExecutor() as pool:
        compared = list(pool.map(compare, true, images))
    found.psnr_low, found.psnr, found.psnr_high = low_median_high([each.psnr for each in compared])
    found.verdicts = dict(Counter(each.verdict for each in compared))
    found.ssim = statistics.fmean(each.ssim for each in compared)
    with torch.no_grad():
        parts = zip(expected.split(64), floats.split(64), strict=True)
        found.distance = torch.cat([judge.distance(*pair) for pair in parts]).mean().item()
    found.lightness = statistics.fmean(each.shift.lightness for each in compared)
    found.contrast = statistics.fmean(each.shift.contrast for each in compared)
    found.saturation = statistics.fmean(each.shift.saturation for each in compared)
    found.paler = statistics.fmean(each.washed_out for each in compared)
    return found


def low_median_high(values: list[float]) -> tuple[float, float, float]:
    """The one that a share LOW of them is below, the middle one, and the one that as many are above; infinite ones
    too."""
    values, aside = sorted(values), int(LOW * len(values))
    return values[aside], values[len(values) // 2], values[-1 - aside]


def note_of(choices: dict[str, Any], dtype: torch.dtype) -> str:
    """Which choices change nothing here, and the route of the last call."""
    without = [name for name, value in choices.items() if why_no_effect(name, value, dtype=dtype)]
    wanted = LOW_BIT_BACKENDS.get(choices.get("low_bit", ""))
    if wanted is not None and "low_bit" not in without:
        found = runtime.status()["backend"]
        attends = found in WITHOUT_ATTENTION
        found = WITHOUT_ATTENTION.get(found, found)
        only = choices.get("low_bit_only", False)
        without += ["low_bit"] if found not in (wanted, LOW_BIT_ONLY[wanted]) else []
        without += ["low_bit_only"] if only and found != LOW_BIT_ONLY[wanted] else []
        without += ["low_bit_attention"] if choices.get("low_bit_attention", False) and not attends else []
    idle = f"no effect here: {', '.join(without)}" if without else ""
    return "; ".join(part for part in (runtime.status()["route"] or "", idle) if part)


def write_sheet(file: Path, columns: list[Tensor], names: list[str], wanted: list[Case]) -> None:
    """A column a setting, a row a prompt, with what they are. names: of the columns, each with its distance."""
    from PIL import Image, ImageDraw

    side, head, left = SHEET_SIDE, 56, 150
    rows = len(columns[0])
    sheet = Image.new("RGB", (left + side * len(columns), head + side * rows), "white")
    draw = ImageDraw.Draw(sheet)
    for at, (name, images) in enumerate(zip(names, columns, strict=True)):
        words = name.removeprefix("onediff").strip(" ,+") or name
        draw.multiline_text((left + at * side + 4, 4), wrapped(words, 20), fill="black")
        for place, image in enumerate(images):
            tile = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).resize((side, side))
            sheet.paste(tile, (left + at * side, head + place * side))
    for place, case in enumerate(wanted[:rows]):
        words = wrapped(f"{case.prompt} (seed {case.seed})", 23)
        draw.multiline_text((4, head + place * side + 4), words, fill="black")
    sheet.save(file)


def wrapped(words: str, width: int) -> str:
    return "\n".join(textwrap.wrap(words, width))

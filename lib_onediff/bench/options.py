"""What the benchmark can be asked to do, on the command line."""
from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from . import models
from .image_settings import IMAGE_SETTINGS
from .patches import PATCHES
from .variants import VARIANTS, WITHOUT_GPU

Size = tuple[int, int]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SIZES: dict[str, list[Size]] = {
    "sdxl": [(1024, 1024), (832, 1216), (960, 720)],
    "sd15": [(512, 512), (512, 768), (960, 720)],
    "tiny": [(128, 128), (72, 88)],
}
# SDXL's: the nine sizes around one megapixel that it was trained at, an odd one, a larger and a smaller one.
TWELVE_SIZES: dict[str, list[Size]] = {
    "sdxl": [
        (1024, 1024), (1152, 896), (896, 1152), (1216, 832), (832, 1216), (1344, 768), (768, 1344), (1536, 640),
        (640, 1536), (960, 720), (1280, 1280), (768, 768),
    ],
    "sd15": [
        (512, 768), (768, 512), (768, 768), (512, 640), (640, 512), (640, 640), (576, 704), (704, 576), (456, 680),
        (960, 544), (960, 720), (1024, 1024),
    ],
    "tiny": [(64 + 8 * step, 128) for step in range(12)],
}


def size_of(text: str) -> Size:
    """(width, height) from "1024x768"."""
    width, _, height = text.partition("x")
    if not (width.isdigit() and height.isdigit()) or int(width) % 8 or int(height) % 8 or not int(width) * int(height):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 1024x768 with both sides multiples of 8")
    return int(width), int(height)


def name_of(size: Size) -> str:
    return f"{size[0]}x{size[1]}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m lib_onediff.bench", description="Compare the host's UNet with ours in one run."
    )
    parser.add_argument("--models", nargs="+", choices=list(models.CONFIGURATIONS), metavar="NAME",
                        default=["sdxl", "sd15"] if gpu else ["tiny-sd15", "tiny-sdxl"],
                        help=f"configurations with random weights: {', '.join(models.CONFIGURATIONS)}")
    parser.add_argument("--model", type=Path, help="a diffusers folder or a checkpoint file instead")
    parser.add_argument("--sizes", nargs="+", type=size_of, metavar="WxH", help="pixels; several are run in turn")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), metavar="NAME",
                        default=list(VARIANTS) if gpu else list(WITHOUT_GPU), help=f"of: {', '.join(VARIANTS)}")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp16" if gpu else "fp32")
    parser.add_argument("--batch", type=int, default=2, help="latents per call (2: one image with guidance)")
    parser.add_argument("--tokens", type=int, default=77)
    parser.add_argument("--runs", type=int, default=30,
                        help="timed calls per variant and size; 0: only what the options below ask for")
    sections = parser.add_argument_group("what else to measure")
    sections.add_argument("--cold", action="store_true",
                          help="each variant's first calls in a fresh process with empty caches, and in the next one")
    sections.add_argument("--new-sizes", nargs="*", type=size_of, metavar="WxH",
                          help="first calls at sizes never seen, the host's and ours; without sizes: twelve")
    sections.add_argument("--patches", nargs="+", choices=list(PATCHES), metavar="NAME", default=[],
                          help=f"UNet calls with each of these on the UNet as well: {', '.join(PATCHES)}")
    sections.add_argument("--images", action="store_true",
                          help="whole images of the first size through a pipeline, with --steps steps")
    sections.add_argument("--at-once", type=int, default=1, metavar="N", help="with --images: so many by one call")
    sections.add_argument("--text-encoders", action="store_true",
                          help="with --images: encode the prompt for each call, by encoders with random weights")
    sections.add_argument("--two-gpus", action="store_true",
                          help="calls and images on one GPU and on two, in turn, and nothing else")
    sections.add_argument("--quality", type=int, nargs="?", const=200, metavar="IMAGES",
                          help="how far each setting's images are from the host's, on trained weights")
    sections.add_argument("--low-bit", action="store_true",
                          help="what products in eight bits gain on this GPU, and SDXL's step with them; nothing else")
    sections.add_argument("--sheet", type=Path, help="with --quality: write images side by side into this PNG file")
    sections.add_argument("--judge", type=Path, help="with --quality: another classifier than the one of ours")
    sections.add_argument("--settings", nargs="+", choices=list(IMAGE_SETTINGS), metavar="NAME",
                          help=f"of --images and --quality, of: {'; '.join(IMAGE_SETTINGS)}")
    parser.add_argument("--json", type=Path, default=Path("onediff-bench.json"))
    parser.add_argument("--webui", metavar="URL", help="time the images of a running WebUI instead")
    parser.add_argument("--steps", type=int, default=20, help="steps of an image with --webui, --images or --quality")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def sizes_for(model: str, chosen: list[Size] | None) -> list[Size]:
    return chosen or SIZES[kind_of(model)]


def many_sizes_for(model: str, chosen: list[Size] | None) -> list[Size]:
    return chosen or TWELVE_SIZES[kind_of(model)]


def kind_of(model: str) -> str:
    return "tiny" if model.startswith("tiny") else "sdxl" if model == "sdxl" else "sd15"


def ours_among(variants: list[str]) -> str:
    """The first of these variants that is ours; if none is, the first of ours that this machine can run."""
    available = list(VARIANTS) if torch.cuda.is_available() else list(WITHOUT_GPU)
    return next(name for name in (*variants, *available) if VARIANTS[name].ours)


def another_size(sizes: Sequence[Size]) -> Size:
    """A square that is none of these sizes, and not larger than any where that can be: to warm a process up."""
    smallest = min(width * height for width, height in sizes)
    squares = [(side, side) for side in (512, 256, 128, 64) if (side, side) not in sizes]
    return next((square for square in squares if square[0] ** 2 <= smallest), squares[-1])

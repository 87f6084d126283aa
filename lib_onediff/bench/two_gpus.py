"""Measure calls and images on two GPUs beside the same on one, in turn."""
from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..engines import NATIVE
from ..public import compile_pipe, uncompile_pipe
from ..runtime.runtime import runtime
from .clock import give_back_memory, in_turn, seconds
from .images import MOST_RUNS, Images
from .models import inputs
from .options import Size, kind_of, name_of

# Of images that make a size ready.
FEW_STEPS = 4
SIZES: dict[str, list[Size]] = {
    "sdxl": [(1024, 1024), (1280, 1280)], "sd15": [(768, 768)], "tiny": [(128, 128)],
}
HEADINGS = (
    "model", "size", "one GPU, ms a call", "two, ms a call", "x", "one GPU, s an image", "two, s an image", "x",
    "largest difference", "cards",
)


@dataclass
class TwoGpusRow:
    """One size. Medians: of calls in milliseconds, of images in seconds; on one card and on two. largest_difference:
    between the two images, of a range of 1. cards: what computed, or why one did."""

    model: str
    size: str
    call_ms: tuple[float, float]
    image_s: tuple[float, float]
    largest_difference: float
    cards: str
    calls_ms: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []), repr=False)
    images_s: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []), repr=False)

    def cells(self) -> list[str]:
        cells = [self.model, self.size]
        for (one, two), form in ((self.call_ms, ".2f"), (self.image_s, ".3f")):
            cells += [f"{one:{form}}", f"{two:{form}}", f"{one / two:.2f}"]
        return [*cells, f"{self.largest_difference:.4f}", self.cards]


def two_gpus(model: str, options: argparse.Namespace, device: torch.device) -> list[TwoGpusRow]:
    """A row for each size: the same weights twice on the first card, one of them with a copy on the second."""
    drawings = [Images(model, options, device) for _ in range(2)]
    for drawing, second in zip(drawings, ("off", "auto"), strict=True):
        compile_pipe(drawing.pipe, backend=NATIVE, second_gpu=second)
    rows = [at_size(model, drawings, size, options, device) for size in options.sizes or SIZES[kind_of(model)]]
    for drawing in drawings:
        uncompile_pipe(drawing.pipe)
    give_back_memory()
    return rows


def at_size(
    model: str, drawings: list[Images], size: Size, options: argparse.Namespace, device: torch.device
) -> TwoGpusRow:
    images: list[Tensor] = []
    for drawing in drawings:
        drawing.steps = FEW_STEPS
        drawing.make_ready(size)
        drawing.steps = options.steps
        images.append(drawing.draw(size))
    second = runtime.status()["second_gpu"]
    images_s: tuple[list[float], list[float]] = ([], [])
    for _ in range(max(1, min(options.runs, MOST_RUNS))):
        for drawing, times in zip(drawings, images_s, strict=True):
            times.append(seconds(lambda drawing=drawing: drawing.draw(size), device))  # type: ignore[misc]
    calls = [call_of(drawing, size, options) for drawing in drawings]
    for call in calls:
        for _ in range(4):
            call()
    one, two = in_turn(calls, options.runs, device)
    call_ms, image_s = ((statistics.median(first), statistics.median(other)) for first, other in ((one, two), images_s))
    difference = float((images[0] - images[1]).abs().max())
    cards = second["split"] or second["reason"]
    return TwoGpusRow(model, name_of(size), call_ms, image_s, difference, cards, (one, two), images_s)


def call_of(drawing: Images, size: Size, options: argparse.Namespace) -> Callable[[], object]:
    unet = drawing.pipe.unet
    arguments = inputs(unet, *size, options.batch, options.tokens, drawing.dtype)

    def call() -> object:
        with torch.no_grad():
            return unet(**arguments, return_dict=False)[0]

    return call

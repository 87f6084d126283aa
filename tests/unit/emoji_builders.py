"""A catalogue like that of the packages, of drawings that are made here."""
from __future__ import annotations

from pathlib import Path

import numpy
import torch

from lib_onediff.demo.train.captions import HeldOut
from lib_onediff.demo.train.raster import Pixels, Sprites
from lib_onediff.demo.train.setup import Setup
from lib_onediff.demo.train.sources import FLUENT, NOTO, Catalogue, Emoji, write_catalogue

SIDE = 64


def catalogue_of(names: list[str]) -> Catalogue:
    """Squares of one colour each."""
    emoji = []
    for number, name in enumerate(names):
        body = f'<rect width="128" height="128" fill="rgb({number % 256},{number * 7 % 256},{number * 31 % 256})"/>'
        emoji.append(Emoji(name, ("thing", f"word{number % 9}"), "group", number % 2 == 0, {NOTO: body, FLUENT: body}))
    origins = ({"name": "squares", "version": "1", "license": "MIT"},)
    return Catalogue(tuple(emoji), {NOTO: 128, FLUENT: 128}, origins)


def held_out_catalogue() -> Catalogue:
    """Every emoji that a held-out caption names."""
    held_out = HeldOut.read()
    names = [name for name, _ in held_out.backgrounds] + [name for pair in held_out.pairs for name in pair]
    return catalogue_of(list(dict.fromkeys(names)))


def pixels_of(catalogue: Catalogue) -> Pixels:
    """What raster.rasterised would make: the left half of each is red, the right half its own colour, all opaque."""
    count = 2 * len(catalogue)
    pixels = numpy.full((count, SIDE, SIDE, 4), 255, numpy.uint8)
    pixels[..., : SIDE // 2, :3] = (255, 0, 0)
    for number in range(count):
        pixels[number, :, SIDE // 2 :, :3] = (0, number * 40 % 256, 255)
    return pixels


def sprites_of(catalogue: Catalogue) -> Sprites:
    return Sprites(pixels_of(catalogue), torch.device("cpu"))


def setup_of(folder: Path, steps: int) -> Setup:
    """A training of three emoji and so many steps a stage, whose pixels are there already."""
    catalogue = catalogue_of(["red apple", "rocket", "cat"])
    folder.mkdir(exist_ok=True)
    data, cache = folder / "emoji.json.xz", folder / "cache"
    if not data.exists():
        write_catalogue(catalogue, data)
        cache.mkdir()
        numpy.save(cache / f"sprites_{len(catalogue)}_{SIDE}.npy", pixels_of(catalogue))
    return Setup(
        folder=folder / "training", data=data, seconds=600, total=600, steps=steps, batch=2, scenes=4, largest=SIDE,
        cache=cache,
    )

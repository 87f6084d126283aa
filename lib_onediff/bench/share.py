"""Makes a row for the table of cards that users contribute to: times and differences of a WebUI's images by each
preset.

The files contain the card's name, versions, sizes and numbers, and no path, prompt, checkpoint or address.
"""
from __future__ import annotations

import argparse
import base64
import io
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..core.quality import ImageComparison, compare
from ..core.sizes import Size, parse_size
from ..runtime.runtime import runtime
from .images import STATUS, STEPS_TO_SETTLE, WebUI
from .steps import Row

OFF = "off"
FILES = ("onediff-card.json", "onediff-card.md")
# So many images are made by each preset, before its time is measured, until OneDiff serves all calls of one.
MOST_IMAGES_UNTIL_READY = 5
HINT = """
Times are medians. In brackets: the speedup over off, and the difference of the images: Exact from off, the others from
Exact. To add this to OneDiff's table of cards, open an issue in its repository with {}."""


def share(options: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """The rows of the command `webui --share`: for each size, of images with OneDiff off and with each preset, which
    are made alternately.
    At the end, writes FILES to the folder options.share, and prints the table for users to contribute. device: unused.

    Raises ValueError, with a sentence for users, if the WebUI does not answer, has an earlier version of OneDiff, is
    not served by OneDiff, or does not send PNG files.
    """
    running = WebUI(options.url)
    if "machine" not in running.ask(STATUS):
        raise ValueError("the WebUI runs an earlier version of OneDiff: update it there, or restart the WebUI")
    # Some WebUIs load their checkpoint with the first image. compare() raises now if scikit-image is missing.
    image = pixels(running.draw((options.size or [Size(512, 512)])[0], STEPS_TO_SETTLE, [True])[1])
    compare(image, image)
    status = running.ask(STATUS)
    if not status["model"]:
        raise ValueError(f"OneDiff does not serve this WebUI: {status['reason']}")
    facts = {
        **status["machine"], **{name: status[name] for name in ("release", "model", "backend")},
        "steps": options.steps, "runs": options.runs,
    }
    rows = []
    lines = []
    for size in options.size or [parse_size(runtime.services.families.usual_sizes(status["model"])[0].sizes[0])]:
        made = list(measured(running, size, options, status["presets"]))
        yield from made
        rows += made
        lines.append(line(facts, made))
    document = json.dumps({**facts, "rows": rows}, indent=1)
    for name, text in zip(FILES, (document, "\n".join(lines)), strict=True):
        (options.share / name).write_text(text + "\n", encoding="utf-8")
    heads = ["card", "driver", "torch", "WebUI", "model", OFF, *status["presets"]]
    files = " and ".join(str(options.share / name) for name in FILES)
    print("\n".join([joined(heads), joined(["---"] * len(heads)), *lines, HINT.format(files)]))


def measured(running: WebUI, size: Size, options: argparse.Namespace, presets: Sequence[str]) -> Iterator[Row]:
    """The rows of one size: one with OneDiff off, and one for each preset. presets: their names; the first one is
    exact. The images of the first preset are compared with those of off, and the images of the other presets with those
    of the first. psnr_db (None if more than half are equal) and ssim are medians; the row of off has neither.
    """
    exact = presets[0]
    chosen: dict[str, list[Any]] = {OFF: [False], **{name: [True, name] for name in presets}}

    for name, arguments in chosen.items():
        for _ in range(MOST_IMAGES_UNTIL_READY):
            # Until everything is compiled, checked and captured, the WebUI computes some of the calls.
            if not running.draw(size, options.steps, arguments)[2]["host"] or name == OFF:
                break
    times: dict[str, list[float]] = {name: [] for name in chosen}
    calls: dict[str, Counter[str]] = {name: Counter() for name in chosen}
    found: dict[str, list[ImageComparison]] = {name: [] for name in presets}
    for seed in range(1, options.runs + 1):
        images = {}
        for name, arguments in chosen.items():
            # The first image after a change moves weights and captures graphs again, so it is not timed.
            running.draw(size, options.steps, arguments, seed)
            seconds, file, served = running.draw(size, options.steps, arguments, seed)
            times[name].append(seconds)
            calls[name] += served
            images[name] = pixels(file)
        for name in presets:
            found[name].append(compare(images[OFF if name == exact else exact], images[name]))
    off_s = statistics.median(times[OFF])
    for name in chosen:
        row: Row = {"size": size.resolution, "options": name, "image_s": statistics.median(times[name])}
        row["x_off"] = off_s / row["image_s"]
        if name != OFF:
            # The lower median: with an even number of images, "identical" must hold for more than half.
            psnr = statistics.median_low(each.psnr for each in found[name])
            row["psnr_db"] = psnr if math.isfinite(psnr) else None
            row["ssim"] = statistics.median(each.ssim for each in found[name])
        served_by = ", ".join(f"{count} {route}" for route, count in calls[name].items())
        yield {**row, "served_by": served_by, "all_s": times[name]}


def pixels(file: str) -> Any:
    """The image in a PNG file, which is given in base64, as a NumPy array of uint8, (height, width, 3). Raises
    ValueError, with a sentence for users, for other formats, which lose details."""
    from PIL import Image

    image = Image.open(io.BytesIO(base64.b64decode(file)))
    if image.format != "PNG":
        raise ValueError(f"the WebUI sends {image.format} files: choose png in its settings for images")
    return np.asarray(image.convert("RGB"))


def line(facts: Row, rows: Sequence[Row]) -> str:
    """The Markdown line of the table of cards for the rows of one size. facts: the machine, versions, model and
    steps."""
    case = f"{facts['model']} {rows[0]['size']}, {facts['steps']} steps"
    return joined([*(facts[name] for name in ("gpu", "driver", "torch", "release")), case, *map(cell, rows)])


def cell(row: Row) -> str:
    """The text of one row in the table of cards, such as "2.90 s (2.80x, 38.1 dB, SSIM 0.987)", "2.90 s (2.80x,
    identical)", or only the time for off."""
    seconds = f"{row['image_s']:.2f} s"
    if row["options"] == OFF:
        return seconds
    is_identical = row["psnr_db"] is None
    difference = "identical" if is_identical else f"{row['psnr_db']:.1f} dB, SSIM {row['ssim']:.3f}"
    return f"{seconds} ({row['x_off']:.2f}x, {difference})"


def joined(cells: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"

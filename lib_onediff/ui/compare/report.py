"""A comparison as files: one HTML page that needs nothing else, and a PNG for each seed with the settings in it."""
from __future__ import annotations

import html
import io
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .job import Pair, Request
from .markup import images_html, numbers_html, style_html, summary_html

INFOTEXT_CHUNK, COMPARISON_CHUNK, FACTS_CHUNK = "parameters", "OneDiff comparison", "OneDiff consistency"
GAP, BACKGROUND = 8, "#202020"
PAGE_STYLE = """
:root { color-scheme: light dark; --border-color-primary: light-dark(#d1d5db, #4b5563);
  --body-text-color-subdued: light-dark(#6b7280, #9ca3af); --onediff-warning: light-dark(#b45309, #fbbf24); }
body { max-width: 1400px; margin: 1.5em auto; padding: 0 1em; font-family: system-ui, sans-serif; line-height: 1.4; }
h1 { font-size: 1.4em; } h2 { margin: 1.6em 0 0.6em; font-size: 1.1em; }
pre { padding: 0.8em; border: 1px solid var(--border-color-primary); border-radius: 0.4em; overflow: auto;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: 0.85em; }
details summary { cursor: pointer; margin: 1em 0 0.4em; }
"""


def save(request: Request, pairs: Sequence[Pair], facts: str, folder: Path) -> list[Path]:
    """Write the page and a PNG for each seed into folder, made if it is not there; returns the files, the page first.

    facts: the consistency report. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{pairs[0].seed}"
    number = 0
    while (page := folder / f"{stem}{f'-{number}' if number else ''}.html").exists():
        number += 1
    write(page, page_html(request, pairs, facts).encode("utf-8"))
    images = [page.with_name(f"{page.stem}-seed-{pair.seed}.png") for pair in pairs]
    for path, pair in zip(images, pairs, strict=True):
        write(path, png_of(request, pair, facts))
    return [page, *images]


def write(path: Path, data: bytes) -> None:
    """Write a file that is whole or not there at all."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def page_html(request: Request, pairs: Sequence[Pair], facts: str) -> str:
    """The report as a page of its own, images and style included."""
    order = request.order
    what = (
        ("Prompt", order.prompt), ("Negative prompt", order.negative_prompt), ("Size", f"{order.width}x{order.height}"),
        ("Steps", order.steps), ("CFG scale", f"{order.cfg_scale:g}"), ("Sampler", order.sampler),
    )
    asked = "\n".join(f"{name}: {value}" for name, value in what if value)
    images = "".join(
        f"<h2>Seed {pair.seed}</h2>{images_html(pair, request.sides, str(number))}"
        for number, pair in enumerate(pairs)
    )
    infotexts = "\n\n".join(made.infotext for pair in pairs for made in (pair.first, pair.second))
    numbers = summary_html(pairs, request.sides, request.warm_up) + numbers_html(pairs)
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>OneDiff comparison</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<style>{PAGE_STYLE}</style>{style_html()}</head><body class="onediff-report"><h1>OneDiff comparison</h1>'
        f"{numbers}<h2>What was asked for</h2><pre>{html.escape(asked)}</pre>{images}"
        f"{folded('What every image says of itself', infotexts)}{folded('The machine', facts)}</body></html>"
    )


def folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary><pre>{html.escape(text)}</pre></details>"


def png_of(request: Request, pair: Pair, facts: str) -> bytes:
    """Both images of a seed and their difference beside one another. The text chunks: the left image's infotext,
    as a WebUI reads it; the comparison as JSON; the consistency report."""
    from PIL import Image, PngImagePlugin

    shown = [image.convert("RGB") for image in (pair.first.image, pair.second.image, pair.difference.image)]
    width, height = shown[0].size
    sheet = Image.new("RGB", (len(shown) * (width + GAP) - GAP, height), BACKGROUND)
    for place, image in enumerate(shown):
        sheet.paste(image, (place * (width + GAP), 0))
    texts = PngImagePlugin.PngInfo()
    for name, text in (
        (INFOTEXT_CHUNK, pair.first.infotext), (COMPARISON_CHUNK, json.dumps(described(request, pair))),
        (FACTS_CHUNK, facts),
    ):
        texts.add_itxt(name, text)
    file = io.BytesIO()
    sheet.save(file, format="PNG", pnginfo=texts)
    return file.getvalue()


def described(request: Request, pair: Pair) -> dict[str, Any]:
    """The comparison of a seed for programs. Seconds are those of a whole image."""
    return {
        "seed": pair.seed, **pair.comparison.as_dict(), "difference_gain": pair.difference.gain,
        "order": {**vars(request.order), "seed": pair.seed},
        "sides": [
            {"name": side.name, "settings": side.described, "seconds": made.seconds, "infotext": made.infotext,
             "route": made.status.get("route"), "step_ms": made.status.get("step_ms")}
            for side, made in zip(request.sides, (pair.first, pair.second), strict=True)
        ],
    }

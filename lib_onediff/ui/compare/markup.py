"""A comparison's images and numbers as markup, for the page and for the report alike. It needs compare.css."""
from __future__ import annotations

import base64
import html
import io
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...engines import ONEFLOW
from ...options.effects import Machine, described
from ...options.infotext import options_of_a_run
from ...quality.comparison import percent, signed
from ...shapes.table import ENOUGH, Timing
from .. import texts
from ..amounts import NOTHING, milliseconds, seconds
from ..status import ROUTES, reasons_of
from .job import GeneratedImage, Pair
from .sides import Side

STYLE = Path(__file__).with_name("compare.css")
VIEWS = {"slide": "Slider", "beside": "Side by side", "difference": "Difference"}
# An image that is smaller than so many pixels is shown enlarged.
LEAST_WIDTH = 512
COLUMNS = ("Seed", "Verdict", "PSNR", "SSIM", "Largest", "Lightness", "Contrast", "Saturation", "Left", "Right")
SLIDE = "this.parentElement.style.setProperty('--onediff-at', this.value + '%')"


def style_html() -> str:
    """The rules that the markup needs, as an element."""
    return f"<style>{STYLE.read_text(encoding='utf-8')}</style>"


def images_html(pair: Pair, sides: Sequence[Side], name: str = "page") -> str:
    """The two images of a seed over one another, side by side, and their difference; radio buttons choose.

    name: tells several of them on one page apart.
    """
    views = "".join(
        f'<input type="radio" name="onediff-view-{name}" id="onediff-{view}-{name}" class="onediff-view-{view}"'
        f'{" checked" if view == "slide" else ""}><label for="onediff-{view}-{name}">{label}</label>'
        for view, label in VIEWS.items()
    )
    width, height = pair.first.image.size
    scale = max(1, math.ceil(LEAST_WIDTH / width))
    style = f"--onediff-at: 50%; --onediff-width: {width * scale}px; --onediff-aspect: {width / height:.4f}"
    figures = figure("left", pair.first.image, f"Left: {sides[0].name}")
    figures += figure("right", pair.second.image, f"Right: {sides[1].name}")
    figures += figure("map", pair.difference.image, difference_caption(pair))
    return (
        f'<div class="onediff-compare" role="group" aria-label="Seed {pair.seed}, left and right">{views}'
        f'<div class="onediff-frame{" onediff-enlarged" if scale > 1 else ""}" style="{style}">{figures}'
        f'<input type="range" class="onediff-handle" min="0" max="100" step="1" value="50" oninput="{SLIDE}" '
        f'aria-label="Where the left image ends and the right one begins"><div class="onediff-line"></div>'
        "</div></div>"
    )


def difference_caption(pair: Pair) -> str:
    if pair.comparison.identical:
        return "No pixel differs"
    return f"Difference, amplified {pair.difference.gain} times" if pair.difference.gain > 1 else "Difference"


def figure(kind: str, image: Any, caption: str) -> str:
    text = html.escape(caption)
    return (
        f'<figure class="onediff-{kind}"><img src="{data_address(image)}" alt="{text}" width="{image.width}" '
        f'height="{image.height}" draggable="false"><figcaption title="{text}">{text}</figcaption></figure>'
    )


def data_address(image: Any) -> str:
    """The image as an address that holds all of it, without its metadata."""
    file = io.BytesIO()
    image.convert("RGB").save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def numbers_html(pairs: Sequence[Pair]) -> str:
    """How the images of each seed differ."""
    titles = {name: f' title="{meaning}"' for name, meaning in texts.MEANINGS.items()}
    headings = "".join(f'<th scope="col"{titles.get(name, "")}>{name}</th>' for name in COLUMNS)
    rows = "".join(row_html(pair) for pair in pairs)
    return (
        '<div class="onediff-numbers" tabindex="0" role="region" aria-label="How the images differ">'
        f"<table><thead><tr>{headings}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def summary_html(pairs: Sequence[Pair], sides: Sequence[Side], warmed_up: bool) -> str:
    """The verdict over all seeds, and a card for each side: its settings, its time, and how it was made. warmed_up:
    whether an image of each side was made before these."""
    cards = "".join(
        card_html(label, side, [getattr(pair, which) for pair in pairs])
        for label, side, which in zip(("Left", "Right"), sides, ("first", "second"), strict=True)
    )
    told = html.escape(verdict(pairs, warmed_up))
    return f'<p class="onediff-verdict">{told}</p><div class="onediff-cards">{cards}</div>'


def card_html(label: str, side: Side, made: Sequence[GeneratedImage]) -> str:
    status = made[-1].status
    facts = (
        ("Settings", side.described), ("Time", seconds_an_image(made)),
        ("UNet step", milliseconds(status.get("step_ms")) if side.settings.enabled else ""),
        ("Route", ROUTES.get(status.get("route", ""), NOTHING)),
        ("Why", "; ".join(reasons_of(status)) if side.settings.enabled else ""), *remarks(side),
    )
    lines = "".join(f"<dt>{name}</dt><dd>{html.escape(value)}</dd>" for name, value in facts if value)
    return f'<section class="onediff-card"><h4>{label}: {html.escape(side.name)}</h4><dl>{lines}</dl></section>'


def remarks(side: Side) -> list[tuple[str, str]]:
    """(option, sentence) for what a side sets that has no effect on this machine, or whose effect needs a word."""
    if not side.settings.enabled:
        return []
    names = options_of_a_run()
    machine = Machine.now(side.settings.backend == ONEFLOW)
    return list(described({name: getattr(side.settings, name) for name in names}, machine).items())


def verdict(pairs: Sequence[Pair], warmed_up: bool) -> str:
    """One sentence on all seeds, and how the times compare."""
    pale = sum(pair.comparison.washed_out for pair in pairs)
    if len(pairs) == 1:
        words = sentence_of(pairs[0])
    elif pale:
        words = texts.paler(pale, len(pairs))
    elif all(pair.comparison.identical for pair in pairs):
        words = texts.IDENTICAL
    else:
        worst = min(pairs, key=lambda pair: pair.comparison.psnr)
        words = texts.differs_most(worst.seed, sentence_of(worst))
    return f"{words} {speeds(pairs, warmed_up)}"


def sentence_of(pair: Pair) -> str:
    """What the numbers mean, in the words of the page."""
    return pair.comparison.sentence().replace("The second image", "The right image")


def speeds(pairs: Sequence[Pair], warmed_up: bool) -> str:
    """How the times compare, in ratios of the two images of a seed. The very first pair is cold, unless warmed_up."""
    warm = pairs if warmed_up else pairs[1:]
    found = Timing.of(pair.first.seconds / max(pair.second.seconds, 1e-9) for pair in warm)
    if found is None or found.low is None or found.high is None:
        return texts.more_images(ENOUGH if warmed_up else ENOUGH + 1)
    middle, low, high = found.median, found.low, found.high
    if low <= 1 <= high:
        return texts.EQUALLY_FAST
    slower, faster = ("right", "left") if middle < 1 else ("left", "right")
    low, middle, high = (1 / high, 1 / middle, 1 / low) if middle < 1 else (low, middle, high)
    return texts.faster(faster, slower, (middle, low, high), len(warm))


def row_html(pair: Pair) -> str:
    found = pair.comparison
    cells = (
        "equal" if found.identical else f"{found.psnr:.1f} dB", f"{found.ssim:.4f}", f"{found.largest:.0f}",
        signed(found.shift.lightness), percent(found.shift.contrast), percent(found.shift.saturation),
        seconds(pair.first.seconds), seconds(pair.second.seconds),
    )
    kind = ' class="onediff-pale"' if found.washed_out else ""
    return (
        f'<tr{kind}><th scope="row">{pair.seed}</th><td class="onediff-words">{html.escape(sentence_of(pair))}</td>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
    )


def seconds_an_image(made: Sequence[GeneratedImage]) -> str:
    mean = f"{seconds(statistics.fmean(image.seconds for image in made))} an image"
    return mean if len(made) == 1 else f"{mean}, mean of {len(made)}"

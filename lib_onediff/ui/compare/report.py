"""The numbers of a comparison as markup: a verdict, a table of the two sides, and one of the seeds."""
from __future__ import annotations

import html
import statistics
from collections.abc import Sequence

from ...core.table import ENOUGH
from ..amounts import milliseconds, seconds, speedup
from ..infotext import describe
from ..markup import table_html
from ..status import ROUTES, reasons_of
from .job import Pair, Request, Side
from .viewer import psnr_of

# The columns of the table of the seeds, and their tooltips.
COLUMNS = ("Seed", "Verdict", "PSNR", "SSIM", "Largest", "ΔE", "Left", "Right")
MEANINGS = {
    "PSNR": "peak signal-to-noise ratio: above 48 dB no difference is seen",
    "SSIM": "structural similarity: 1 is the same image",
    "Largest": "the largest difference of a red, green or blue value, of 255",
    "ΔE": "mean difference of the colours in CIELAB; people notice about 2.3",
    "Left": "how long the left image took", "Right": "how long the right image took",
}


def request_html(title: str, first: Request) -> str:
    """A paragraph with the title, the size, the sampler, the first seed and the prompt of a comparison, as markup."""
    prompt = f"“{first['prompt']}”" if first["prompt"] else "no prompt"
    asked = (
        f"{title}: {first['width']}x{first['height']}, {first['steps']} steps of {first['sampler_name']}, "
        f"seed {first['seed']}, {prompt}"
    )
    return f'<p class="onediff-reason">{html.escape(asked)}</p>'


def outcome_html(pairs: Sequence[Pair], sides: Sequence[Side]) -> str:
    """Markup with the verdict over all seeds, the table of the sides, and the table of the seeds. Rows of the sides'
    table that have a value for neither side are left out. pairs: at least one. sides: the left, then the right."""
    facts = [facts_of(side, pairs, number) for number, side in enumerate(sides)]
    rows = []
    for name in facts[0]:
        of_sides = [side[name] for side in facts]
        if any(of_sides):
            rows.append((name, *of_sides))
    columns = ("", f"Left: {sides[0].name}", f"Right: {sides[1].name}")
    return (
        f'<p class="onediff-verdict">{html.escape(verdict(pairs))}</p>'
        + table_html("The two sides", columns, rows, {})
        + table_html("How the images differ", COLUMNS, map(cells_of, pairs), MEANINGS)
    )


def verdict(pairs: Sequence[Pair]) -> str:
    """How much the images of the seed with the lowest PSNR differ, in one or two sentences. pairs: at least one."""
    worst = min(pairs, key=lambda pair: pair.comparison.psnr)
    words = worst.comparison.sentence()
    return words if len(pairs) == 1 or worst.comparison.largest == 0 else f"Seed {worst.seed} differs most. {words}"


def speed_of_right(pairs: Sequence[Pair]) -> str:
    """How much faster the right side is than the left, for example "1.6x faster": the median, over the seeds, of the
    left image's seconds divided by the right image's. If the right side is faster for some seeds and slower for others,
    "no measurable difference"; "" for fewer than ENOUGH seeds."""
    ratios = []
    for pair in pairs:
        left, right = pair.images
        ratios.append(left.seconds / max(right.seconds, 1e-9))
    if len(ratios) < ENOUGH:
        return ""
    # If the seeds disagree on which side is faster, neither counts as faster.
    return speedup(1.0 if min(ratios) <= 1 <= max(ratios) else statistics.median(ratios))


def facts_of(side: Side, pairs: Sequence[Pair], number: int) -> dict[str, str]:
    """One side's column in the table of the sides: a text for each row, by the row's name; "" for a row without a
    value. "Time" is a mean over all seeds, and "Speed", which only the right side has, is over all seeds too; "Step",
    "Route" and "Why" are those of the last seed. pairs: at least one. number: 0 for the left side, 1 for the right."""
    status = pairs[-1].images[number].status
    on = side.settings.enabled
    mean = f"{seconds(statistics.fmean(pair.images[number].seconds for pair in pairs))} an image"
    return {
        "Settings": describe(side.settings), "Time": mean if len(pairs) == 1 else f"{mean}, mean of {len(pairs)}",
        "Speed": speed_of_right(pairs) if number else "",
        "Step": "" if status.get("step_ms") is None else milliseconds(status["step_ms"]),
        "Route": ROUTES.get(status.get("route", ""), ""), "Why": "; ".join(reasons_of(status)) if on else "",
    }


def cells_of(pair: Pair) -> Sequence[str]:
    """The texts of one seed's row in the table of the seeds, in the order of COLUMNS."""
    found = pair.comparison
    times = [seconds(image.seconds) for image in pair.images]
    return (
        str(pair.seed), found.sentence(), psnr_of(found),
        f"{found.ssim:.4f}", f"{found.largest:.0f}", f"{found.delta_e:.2f}", *times,
    )

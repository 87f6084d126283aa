"""Does the model draw what the prompt says? Held-out captions, as a sheet and as the judge's score."""
from __future__ import annotations

import csv
import json
from typing import Any

import torch

from ...quality.judge import Judge, load_judge
from .captions import BACKGROUNDS, HeldOut
from .drawing import Painter
from .setup import Setup
from .sheets import save_sheet

SHEET_ALONE, SHEET_PAIRS = 32, 16
IMAGES = 500


def draw_sheet(setup: Setup, images: int = IMAGES) -> None:
    """The first captions of each kind of held-out ones, seed 0: none is chosen by its image."""
    held_out = HeldOut.read()
    captions = held_out.captions()
    alone = len(held_out.backgrounds)
    chosen = captions[:SHEET_ALONE] + captions[alone : alone + SHEET_PAIRS]
    chosen = chosen[:images]
    drawn = Painter(setup).draw(chosen, [0] * len(chosen))
    save_sheet(drawn, setup.folder / "sheet.png", columns=8, side=160)
    (setup.folder / "sheet.txt").write_text("\n".join(chosen) + "\n", encoding="utf-8")


def score(setup: Setup, images: int = IMAGES) -> dict[str, Any]:
    """Draw held-out captions with seeds 0, 1, 2 ... until there are so many images, and ask the judge."""
    held_out = HeldOut.read()
    captions, shown = held_out.captions(), held_out.names()
    pairs = [(number % len(captions), number // len(captions)) for number in range(images)]
    drawn = Painter(setup).draw([captions[caption] for caption, _ in pairs], [seed for _, seed in pairs])
    judge = load_judge(setup.judge, setup.device)
    rows = []
    for (caption, seed), verdict in zip(pairs, verdicts(judge, drawn), strict=True):
        names, background = shown[caption]
        rows.append({"caption": captions[caption], "seed": seed, **said(verdict, names, background)})
    with (setup.folder / "score.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    result = {
        "recognised": percent([row["recognised"] for row in rows]),
        "alone_top1": percent([row["recognised"] for row in rows if not row["pair"]]),
        "alone_top5": percent([row["top5"] for row in rows if not row["pair"]]),
        "pairs_top2": percent([row["recognised"] for row in rows if row["pair"]]),
        "pairs_top5": percent([row["top5"] for row in rows if row["pair"]]),
        "background": percent([row["background"] for row in rows]), "images": len(rows),
    }
    (setup.folder / "score.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("score", result, flush=True)
    return result


@torch.no_grad()
def verdicts(judge: Judge, images: torch.Tensor) -> list[tuple[list[str], str]]:
    """For each image the judge's first five names and its background."""
    found = []
    for part in images.split(128):
        emoji, ground = judge(part)
        best = emoji.topk(min(5, emoji.shape[1])).indices.tolist()
        grounds = ground.argmax(1).tolist()
        found += [([judge.names[each] for each in five], judge.backgrounds[one])
                  for five, one in zip(best, grounds, strict=True)]
    return found


def said(verdict: tuple[list[str], str], names: tuple[str, ...], background: str) -> dict[str, Any]:
    """Whether an image is what its caption says: as many of the judge's first names as there are emoji."""
    assert background in BACKGROUNDS
    five, ground = verdict
    return {
        "pair": len(names) > 1, "recognised": set(five[: len(names)]) == set(names), "top5": set(names) <= set(five),
        "background": ground == background, "first": five[0], "second": five[1] if len(five) > 1 else "",
    }


def percent(hits: list[bool]) -> float:
    return round(100 * sum(hits) / len(hits), 1) if hits else 0.0

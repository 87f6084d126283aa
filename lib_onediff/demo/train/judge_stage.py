"""Training the judge: which emoji are in an image, and on which background."""
from __future__ import annotations

import json

import torch
from torch import Tensor
from torch.nn import functional

from ...quality.judge import SIDE, Judge, load_judge
from .captions import BACKGROUNDS
from .learner import Learner
from .scenes import Batch, compose
from .setup import Setup

PEAK_RATE = 2e-3
CHECKED = 4000
SEED, SEED_OF_CHECK = 11, 12


def train_judge(setup: Setup) -> None:
    batch, _ = setup.draw(SEED)
    setup.prepare()
    names = [emoji.name for emoji in setup.catalogue.emoji]
    batch = batch.to(setup.device)
    judge = Judge(names, list(BACKGROUNDS)).to(setup.device)
    if setup.judge.is_file():
        judge.load_state_dict(load_judge(setup.judge, setup.device).state_dict())
    learner, clock = Learner({"judge": judge}, decay=0.05), setup.clock("judge")
    learner.load(setup.folder, "judge")
    sprites, generator = setup.sprites, setup.generator()
    clock.start()
    while clock.goes_on():
        rows = batch[torch.randint(len(batch), (setup.batch,), generator=generator).to(setup.device)]
        images = worsened(compose(rows, sprites, SIDE, SIDE), generator)
        with setup.autocast():
            emoji, ground = judge(images)
        losses = {
            "emoji": functional.cross_entropy(emoji.float(), shares(rows, len(names)), label_smoothing=0.05),
            "ground": functional.cross_entropy(ground.float(), rows.ground),
        }
        rate = clock.rate(PEAK_RATE)
        learner.step(losses["emoji"] + 0.2 * losses["ground"], rate)
        clock.step(rate, losses)
    clock.save()
    learner.save(setup.folder, "judge")
    judge.eval().save(setup.judge)
    # As it is stored, by which all scores are given.
    result = accuracy(setup, load_judge(setup.judge, setup.device))
    (setup.folder / "judge.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("judge", result, flush=True)


def shares(batch: Batch, classes: int) -> Tensor:
    """(n, classes): one for a single emoji, a half for each of two."""
    there = (batch.emoji >= 0).float()
    found = torch.zeros(len(batch), classes, device=batch.emoji.device)
    return found.scatter_add_(1, batch.emoji.clamp_min(0), there / there.sum(1, keepdim=True))


def worsened(images: Tensor, generator: torch.Generator) -> Tensor:
    """As a network draws: a little noise, softness or tint, each image differently."""
    softness, strength = torch.rand(2, len(images), 1, 1, 1, generator=generator).to(images.device)
    soft = functional.avg_pool2d(functional.pad(images, (1, 1, 1, 1), mode="replicate"), 3, 1)
    images = torch.lerp(images, soft, softness.square())
    tint = 1 + 0.08 * torch.randn(len(images), 3, 1, 1, generator=generator).to(images.device)
    return images * tint + 0.08 * strength.square() * torch.randn_like(images)


@torch.no_grad()
def accuracy(setup: Setup, judge: Judge) -> dict[str, float]:
    """On rasterised images of other sizes, places and backgrounds than it was trained on."""
    batch, _ = setup.draw(SEED_OF_CHECK, min(CHECKED, setup.scenes))
    batch = batch.to(setup.device)
    single = batch.emoji[:, 1] < 0
    first, five, both, ground = [], [], [], []
    for start in range(0, len(batch), 250):
        part = batch[slice(start, start + 250)]
        emoji, backgrounds = judge(compose(part, setup.sprites, 2 * SIDE, 2 * SIDE))
        best = emoji.topk(min(5, emoji.shape[1])).indices
        first.append(best[:, 0] == part.emoji[:, 0])
        five.append((best == part.emoji[:, :1]).any(1))
        both.append(best[:, :2].sort(1).values == part.emoji.sort(1).values)
        ground.append(backgrounds.argmax(1) == part.ground)

    def percent(hits: list[Tensor], rows: Tensor) -> float:
        chosen = torch.cat(hits)[rows].float()
        return round(100 * chosen.mean().item(), 2) if len(chosen) else 0.0

    return {
        "emoji_top1": percent(first, single), "emoji_top5": percent(five, single),
        "pair_top2": percent([hits.all(1) for hits in both], ~single),
        "background": percent(ground, torch.ones_like(single)),
        "chance_top1": round(100 / len(judge.names), 3), "images": len(batch),
    }

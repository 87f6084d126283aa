"""Chooses random scenes, of one or two emoji on a background, and writes their captions."""
from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from sources import FLUENT, NOTO, Catalogue, Emoji

BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255), "black": (24, 24, 28), "grey": (176, 176, 180), "red": (236, 120, 112),
    "orange": (255, 190, 120), "yellow": (255, 228, 120), "green": (160, 220, 160), "blue": (150, 200, 255),
    "purple": (205, 170, 240), "pink": (255, 190, 210),
}
WHITE = "white"
HELD_OUT = Path(__file__).with_name("held_out.json")
FLUENT_SHARE, PAIR_SHARE, FLIPPED_SHARE, WHITE_SHARE = 0.15, 0.35, 0.15, 0.35
PLACES = {
    "on the left": (-1, 0), "on the right": (1, 0), "at the top": (0, -1), "at the bottom": (0, 1),
}


@dataclass(frozen=True)
class Thing:
    """An emoji in an image. size: its side, as a part of the image's shorter side. x, y: its centre, from -1 to 1."""

    emoji: int
    style: str
    size: float
    x: float
    y: float
    flipped: bool


@dataclass(frozen=True)
class Scene:
    """The content of an image, and its caption."""

    things: tuple[Thing, ...]
    background: str
    caption: str


@dataclass(frozen=True)
class HeldOut:
    """Combinations that no training image shows: (emoji, background), and pairs of emoji in any order."""

    backgrounds: tuple[tuple[str, str], ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()

    @classmethod
    def read(cls) -> HeldOut:
        """The combinations in HELD_OUT, which were chosen before training."""
        read = json.loads(HELD_OUT.read_text(encoding="utf-8"))
        return cls(tuple(map(tuple, read["backgrounds"])), tuple(map(tuple, read["pairs"])))

    @classmethod
    def choose(cls, catalogue: Catalogue, seed: int, backgrounds: int, pairs: int) -> HeldOut:
        """Random combinations, with any background except white."""
        rng = random.Random(seed)
        names = [emoji.name for emoji in catalogue.emoji]
        coloured = [name for name in BACKGROUNDS if name != WHITE]
        alone = [(name, rng.choice(coloured)) for name in rng.sample(names, backgrounds)]
        two = rng.sample(names, 2 * pairs)
        return cls(tuple(alone), tuple(zip(two[::2], two[1::2], strict=True)))

    def captions(self) -> list[str]:
        alone = [f"{with_article(name)} on {with_article(ground)} background" for name, ground in self.backgrounds]
        return alone + [f"{with_article(first)} and {with_article(second)}" for first, second in self.pairs]

    def names(self) -> list[tuple[tuple[str, ...], str]]:
        """The (names of emoji, background) that each caption describes."""
        return [((name,), background) for name, background in self.backgrounds] + [(two, WHITE) for two in self.pairs]

    def scenes(self, catalogue: Catalogue) -> list[Scene]:
        """The scenes of the captions, composed like those for training."""
        found = []
        for caption, (names, background) in zip(self.captions(), self.names(), strict=True):
            boxes = [(0.9, 0.0)] if len(names) == 1 else [(0.44, -0.48), (0.44, 0.48)]
            things = tuple(
                Thing(catalogue.index(name), NOTO, size, x, 0.0, False)
                for name, (size, x) in zip(names, boxes, strict=True)
            )
            found.append(Scene(things, background, caption))
        return found


class SceneSource:
    """Chooses random scenes without held-out combinations."""

    def __init__(self, catalogue: Catalogue, held_out: HeldOut, seed: int) -> None:
        self.catalogue = catalogue
        self._rng = random.Random(seed)
        self._alone = set(held_out.backgrounds)
        self._pairs = {frozenset(pair) for pair in held_out.pairs}

    def draw(self) -> Scene:
        rng = self._rng
        while True:
            background = WHITE if rng.random() < WHITE_SHARE else rng.choice(list(BACKGROUNDS))
            if len(self.catalogue) > 1 and rng.random() < PAIR_SHARE:
                first, second = rng.sample(range(len(self.catalogue)), 2)
                if self.is_free((first, second), background):
                    return self._pair(first, second, background)
            elif self.is_free((number := rng.randrange(len(self.catalogue)),), background):
                return self._single(number, background)

    def is_free(self, numbers: tuple[int, ...], background: str) -> bool:
        """Whether these emoji on this background contain no held-out combination."""
        names = [self.catalogue.emoji[number].name for number in numbers]
        return frozenset(names) not in self._pairs and not any((name, background) in self._alone for name in names)

    def _single(self, number: int, background: str) -> Scene:
        rng = self._rng
        words, place = "", ""
        size, x, y = rng.uniform(0.82, 0.94), 0.0, 0.0
        how = rng.random()
        if how < 0.12:
            words, size = "small ", rng.uniform(0.42, 0.55)
            x, y = rng.uniform(-0.4, 0.4), rng.uniform(-0.4, 0.4)
        elif how < 0.24:
            place, (right, down) = rng.choice(list(PLACES.items()))
            size = rng.uniform(0.45, 0.58)
            reach = 1 - size - 0.02
            x = reach * right + rng.uniform(-0.06, 0.06) * (not right)
            y = reach * down + rng.uniform(-0.06, 0.06) * (not down)
        elif how < 0.4:
            size = rng.uniform(0.62, 0.82)
            x, y = rng.uniform(-0.15, 0.15), rng.uniform(-0.15, 0.15)
        else:
            x, y = rng.uniform(-0.04, 0.04), rng.uniform(-0.04, 0.04)
        thing = self._thing(number, size, x, y)
        emoji = self.catalogue.emoji[number]
        if rng.random() < 0.06 and len(emoji.keywords) > 1 and not words:
            name = " ".join(rng.sample(emoji.keywords, 2))
        else:
            name = self._named(emoji, words, thing.style)
        keywords = f", {rng.choice(emoji.keywords)}" if emoji.keywords and rng.random() < 0.25 else ""
        return Scene((thing,), background, name + (place and f" {place}") + keywords + self._behind(background))

    def _pair(self, first: int, second: int, background: str) -> Scene:
        rng = self._rng
        things = tuple(
            self._thing(number, rng.uniform(0.40, 0.47), side * rng.uniform(0.46, 0.5), rng.uniform(-0.15, 0.15))
            for number, side in ((first, -1), (second, 1))
        )
        names = [self._named(self.catalogue.emoji[thing.emoji], "", thing.style) for thing in things]
        caption = rng.choice((" and ", " and ", " beside ", ", ")).join(names) + self._behind(background)
        return Scene(things, background, caption)

    def _thing(self, number: int, size: float, x: float, y: float) -> Thing:
        emoji, rng = self.catalogue.emoji[number], self._rng
        style = FLUENT if FLUENT in emoji.drawings and rng.random() < FLUENT_SHARE else NOTO
        return Thing(number, style, size, x, y, emoji.flips and rng.random() < FLIPPED_SHARE)

    def _named(self, emoji: Emoji, size: str, style: str) -> str:
        name = size + ("flat " if style == FLUENT else "") + emoji.name
        return with_article(name) if self._rng.random() < 0.4 else name

    def _behind(self, background: str) -> str:
        """The part of a caption that names the background, or "". Most captions do not mention a white background."""
        if background == WHITE and self._rng.random() < 0.75:
            return ""
        return self._rng.choice((f" on {with_article(background)} background", f", {background} background"))


def with_article(name: str) -> str:
    """A name with its indefinite article; a plural without one."""
    if name.endswith("s") and not name.endswith("ss"):
        return name
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"

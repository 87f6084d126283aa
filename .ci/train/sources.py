"""Reads the names and drawings of emoji from three npm packages, and writes them to one small file.

The packages are @iconify-json/noto (Apache-2.0), @iconify-json/fluent-emoji-flat (MIT) and emojibase-data (MIT),
downloaded by `npm pack` and unpacked by tar.
"""
from __future__ import annotations

import json
import lzma
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NOTO, FLUENT = STYLES = ("noto", "fluent")
# Flags and letters are texts, clock faces and zodiac signs hard to tell apart at this size, and skin tones, families,
# arrows, and the man and the woman beside each person of a trade many images of one thing: they would cost more of a
# small network than they give.
LEFT_OUT = frozenset((
    "country-flag", "subdivision-flag", "skin-tone", "hair-style", "keycap", "alphanum", "arrow", "av-symbol",
    "transport-sign", "family", "person-symbol", "zodiac", "gender", "religion", "currency",
))
LEFT_OUT_NAMES = re.compile(
    r"o'clock|thirty|facing right|button|: |copyright|registered|trade mark|medium|small square|small (?:orange|blue)"
    r"|^(?:white|black) (?:exclamation|question)|^(?:wo)?m[ae]n |^(?:deaf|pregnant) (?:man|woman|person)$|middle finger"
)
# Turned round, these are something else or text in a mirror.
NOT_FLIPPED = re.compile(
    r"left|right|clock|watch|calendar|page|newspaper|book|card|sign|receipt|ticket|medal|banknote|keyboard|music|mark"
    r"|chart|post office|hospital|hotel|bank|school|store|zzz|hundred|soon|dvd|die|8 ball|map|globe|moon|label"
)
VERSION_FIELDS = ("name", "version", "license")


@dataclass(frozen=True)
class Emoji:
    """An emoji. drawings: the content of an SVG, by style. flips: whether the mirror image has the same name."""

    name: str
    keywords: tuple[str, ...]
    group: str
    flips: bool
    drawings: dict[str, str]


@dataclass(frozen=True)
class Catalogue:
    """All emoji. view_boxes: the side of the drawings, by style. origins: the name, version and licence of each
    package."""

    emoji: tuple[Emoji, ...]
    view_boxes: dict[str, int]
    origins: tuple[dict[str, str], ...]

    def __len__(self) -> int:
        return len(self.emoji)

    def index(self, name: str) -> int:
        return next(number for number, emoji in enumerate(self.emoji) if emoji.name == name)


def read_packages(noto: Path, fluent: Path, names: Path) -> Catalogue:
    """The emoji that we draw, from the folders of the three packages. Raises ValueError for other packages."""
    sets = {NOTO: IconSet(noto), FLUENT: IconSet(fluent)}
    groups = read_json(names / "meta" / "groups.json")["subgroups"]
    found = []
    for entry in read_json(names / "en" / "data.json"):
        name, group = plain(entry["label"]), groups.get(str(entry.get("subgroup")), "")
        if not group or group in LEFT_OUT or LEFT_OUT_NAMES.search(name):
            continue
        drawings = {style: icons.body(entry["hexcode"]) for style, icons in sets.items()}
        if drawings[NOTO]:
            words = tuple(tag for tag in map(plain, entry.get("tags", ())) if tag.isalpha() and tag not in name)
            found.append(Emoji(
                name, words[:4], group, not NOT_FLIPPED.search(name), {k: body for k, body in drawings.items() if body}
            ))
    if len(found) < 100 or len({emoji.name for emoji in found}) < len(found):
        raise ValueError(f"These packages name {len(found)} emoji, or some of them twice.")
    origins = tuple(
        {field: str(read_json(folder / "package.json")[field]) for field in VERSION_FIELDS}
        for folder in (noto, fluent, names)
    )
    return Catalogue(tuple(found), {style: icons.view_box for style, icons in sets.items()}, origins)


class IconSet:
    """The icons of an iconify package, by the code points of the emoji."""

    def __init__(self, folder: Path) -> None:
        icons = read_json(folder / "icons.json")
        self.view_box = int(icons["width"])
        self._icons: dict[str, dict[str, Any]] = icons["icons"]
        self._aliases: dict[str, dict[str, Any]] = icons.get("aliases", {})
        self._names = {without_variant(code): name for code, name in read_json(folder / "chars.json").items()}

    def body(self, code: str) -> str:
        """The content of an emoji's SVG; "" if it has none of the usual size."""
        name = self._names.get(without_variant(code), "")
        icon = self._icons.get(self._aliases.get(name, {}).get("parent", name), {})
        return "" if {"width", "height", "left", "top"} & set(icon) else str(icon.get("body", ""))


def without_variant(code: str) -> str:
    """Code points in lower case, without the variation selector."""
    return code.lower().replace("-fe0f", "")


def plain(text: str) -> str:
    """A text in lower case ASCII, as users type prompts. CLIP's tokenizer ignores case too."""
    folded = unicodedata.normalize("NFKD", text.replace("\u2019", "'").lower())
    return " ".join(folded.encode("ascii", "ignore").decode().replace("-", " ").split())


def read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def write_catalogue(catalogue: Catalogue, file: Path) -> None:
    """Write the catalogue as JSON, compressed by xz."""
    text = json.dumps(asdict(catalogue), ensure_ascii=False, separators=(",", ":"))
    file.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def read_catalogue(file: Path, most: int | None = None) -> Catalogue:
    """The catalogue that write_catalogue has written. most: only so many emoji, evenly spread over all."""
    read = json.loads(lzma.decompress(file.read_bytes()))
    emoji = tuple(emoji_of(read["emoji"]))
    if most is not None and most < len(emoji):
        emoji = tuple(emoji[number * len(emoji) // most] for number in range(most))
    return Catalogue(emoji, read["view_boxes"], tuple(read["origins"]))


def emoji_of(rows: list[dict[str, Any]]) -> Iterator[Emoji]:
    for row in rows:
        yield Emoji(row["name"], tuple(row["keywords"]), row["group"], row["flips"], row["drawings"])

"""What emoji-sd is trained on: scenes, captions, tokens, and none that is held out."""
from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from emoji_builders import SIDE, catalogue_of, held_out_catalogue, sprites_of

from lib_onediff.demo.train.captions import BACKGROUNDS, HeldOut, Scene, SceneSource, Thing, with_article
from lib_onediff.demo.train.raster import rasterise
from lib_onediff.demo.train.scenes import batch_of, compose
from lib_onediff.demo.train.sources import NOTO, read_catalogue, read_packages, write_catalogue
from lib_onediff.demo.train.vocabulary import MOST_TOKENS, POSITIONS, read_tokenizer, tokens_of, write_tokenizer

CPU = torch.device("cpu")


def test_a_hundred_and_fifty_captions_are_held_out() -> None:
    held_out = HeldOut.read()
    assert len(set(held_out.backgrounds)) == 100
    assert len({frozenset(pair) for pair in held_out.pairs}) == 50
    assert len(set(held_out.captions())) == 150
    assert {ground for _, ground in held_out.backgrounds} <= set(BACKGROUNDS) - {"white"}


def shown_of(scene: Scene, names: list[str]) -> set[tuple[frozenset[str], str]]:
    """Each emoji with its background, and all with none."""
    there = [names[thing.emoji] for thing in scene.things]
    return {(frozenset([name]), scene.background) for name in there} | {(frozenset(there), "")}


@pytest.mark.parametrize("known", [True, False], ids=["held_out", "unless_it_does_not_know"])
def test_training_shows_and_says_nothing_that_is_held_out(known: bool) -> None:
    catalogue, held_out = held_out_catalogue(), HeldOut.read()
    names = [emoji.name for emoji in catalogue.emoji]
    hidden = {(frozenset([name]), ground) for name, ground in held_out.backgrounds}
    hidden |= {(frozenset(pair), "") for pair in held_out.pairs}
    source = SceneSource(catalogue, held_out if known else HeldOut(), seed=3)
    scenes = [source.draw() for _ in range(20_000)]
    found = [scene for scene in scenes if shown_of(scene, names) & hidden]
    said = {scene.caption for scene in scenes} & set(held_out.captions())
    assert (not found and not said) if known else (found and said)


def test_scenes_of_held_out_captions_show_what_these_say() -> None:
    catalogue, held_out = held_out_catalogue(), HeldOut.read()
    names = [emoji.name for emoji in catalogue.emoji]
    for scene, (shown, background) in zip(held_out.scenes(catalogue), held_out.names(), strict=True):
        assert tuple(names[thing.emoji] for thing in scene.things) == shown
        assert scene.background == background and all(with_article(name) in scene.caption for name in shown)


def test_the_same_seed_draws_the_same_scenes() -> None:
    first, again, other = (SceneSource(catalogue_of(["cat", "dog"]), HeldOut(), seed) for seed in (1, 1, 2))
    drawn = [first.draw() for _ in range(20)]
    assert drawn == [again.draw() for _ in range(20)] != [other.draw() for _ in range(20)]


def test_captions_name_backgrounds_style_size_and_place() -> None:
    catalogue = catalogue_of(["cat", "axe"])
    source = SceneSource(catalogue, HeldOut(), 5)
    for scene in [source.draw() for _ in range(2000)]:
        assert (f"{scene.background} background" in scene.caption) or scene.background == "white"
        assert sum(word in scene.caption for word in BACKGROUNDS) <= 1
        if "small " in scene.caption:
            assert scene.things[0].size < 0.6
        if "on the left" in scene.caption:
            assert scene.things[0].x < 0
        if "cat and axe" in scene.caption:
            assert scene.things[0].x < 0 < scene.things[1].x and scene.things[0].emoji == 0
        assert not any(thing.flipped and not catalogue.emoji[thing.emoji].flips for thing in scene.things)


def drawn(*things: Thing, background: str = "white", height: int = 64, width: int = 64) -> torch.Tensor:
    batch = batch_of([Scene(things, background, "")])
    return compose(batch, sprites_of(catalogue_of(["cat", "dog"])), height, width)[0]


def test_an_emoji_lies_where_it_was_put_on_its_background() -> None:
    image = drawn(Thing(0, NOTO, 0.5, 0.5, 0.0, False), background="blue")
    ground = torch.tensor(BACKGROUNDS["blue"]) / 127.5 - 1
    torch.testing.assert_close(image[:, :, :30], ground.view(3, 1, 1).expand(3, 64, 30))
    assert image[:, 32, 40].tolist() == pytest.approx([1, -1, -1])
    assert image[:, 32, 58].tolist() == pytest.approx([-1, -1, 1])
    torch.testing.assert_close(image[:, 5, 48], ground)


def test_it_is_turned_round() -> None:
    image = drawn(Thing(0, NOTO, 1.0, 0.0, 0.0, True))
    torch.testing.assert_close(image.flip(2), drawn(Thing(0, NOTO, 1.0, 0.0, 0.0, False)))
    assert image[2, 32, 5] > 0.9 > image[2, 32, 60]


def test_two_lie_beside_each_other_in_any_shape_of_image() -> None:
    image = drawn(Thing(0, NOTO, 0.8, -0.5, 0.0, False), Thing(1, NOTO, 0.8, 0.5, 0.0, False), height=32, width=64)
    assert image.shape == (3, 32, 64)
    # The second's own colour has some green, the first's none.
    assert image[1, 16, 24] < -0.9 < -0.4 < image[1, 16, 58]


def test_a_window_shows_a_part_in_full_size() -> None:
    batch = batch_of([Scene((Thing(0, NOTO, 1.0, 0.0, 0.0, False),), "white", "")])
    window = batch.cropped(0.5, torch.Generator().manual_seed(1))
    assert window.boxes[0, 0, 0] == 2.0 and window.boxes[0, 0, 1:].abs().max() <= 1.0
    sprites = sprites_of(catalogue_of(["cat", "dog"]))
    whole = compose(batch, sprites, 64, 64)
    x = float(window.boxes[0, 0, 1])
    part = compose(window, sprites, 32, 32)
    start = round((1 - x) * 16)
    assert (part[0, 2, 16] - whole[0, 2, 32, start : start + 32]).abs().mean() < 0.15


def test_backgrounds_of_any_colour() -> None:
    batch = batch_of([Scene((), "white", "")] * 200)
    coloured = batch.on_any_colour(0.3, torch.Generator().manual_seed(0))
    assert 30 < (coloured.background != 1).any(1).sum() < 90
    assert (batch.background == 1).all()


def test_the_catalogue_comes_back_as_it_was_written(tmp_path: Path) -> None:
    catalogue = catalogue_of([f"thing {number}" for number in range(20)])
    write_catalogue(catalogue, tmp_path / "emoji.json.xz")
    assert read_catalogue(tmp_path / "emoji.json.xz") == catalogue
    assert [emoji.name for emoji in read_catalogue(tmp_path / "emoji.json.xz", 2).emoji] == ["thing 0", "thing 10"]


def test_packages_of_another_form_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        read_packages(tmp_path, tmp_path, tmp_path)


def test_drawings_become_premultiplied_pixels() -> None:
    pytest.importorskip("resvg_py", reason="it draws SVG, and is needed for training alone")
    half = rasterise(('<rect width="16" height="32" fill="#ff0000" fill-opacity="0.5"/>', 32, SIDE))
    assert half.shape == (SIDE, SIDE, 4)
    assert half[9, 9].tolist() == pytest.approx([128, 0, 0, 128], abs=1) and not half[9, 60].any()
    assert not rasterise(("", 32, SIDE)).any()


def test_the_tokenizer_is_clip_s_with_few_tokens(tmp_path: Path) -> None:
    catalogue = held_out_catalogue()
    write_tokenizer(catalogue, tmp_path)
    tokenizer = read_tokenizer(tmp_path)
    assert len(tokenizer) <= MOST_TOKENS <= 4096
    source = SceneSource(catalogue, HeldOut(), 1)
    captions = [source.draw().caption for _ in range(100)] + ["Émoji & 日本 🚀"]
    random.Random(0).shuffle(captions)
    rows = tokens_of(tokenizer, captions)
    assert {len(row) for row in rows} == {POSITIONS}
    assert all(0 <= token < MOST_TOKENS for row in rows for token in row)
    for caption, row in zip(captions, rows, strict=True):
        decoded = tokenizer.decode(row, skip_special_tokens=True)
        assert "".join(decoded.split()) == "".join(caption.lower().split())
    assert tokenizer.tokenize("blue background") == ["blue</w>", "background</w>"]

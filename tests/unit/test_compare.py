"""Comparing two settings: what is asked for, making it, showing it, keeping it."""
from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio")
pytest.importorskip("PIL")

import gradio
from compare_builders import ORDER, SECONDS, SIDES, Painter, a_pair, a_request, exclusively, image_of
from PIL import Image

from lib_onediff.options.changes import read_changes
from lib_onediff.options.settings import Settings
from lib_onediff.ui.compare import tab as compare_tab
from lib_onediff.ui.compare.handlers import ComparePanel
from lib_onediff.ui.compare.job import STEPS_TO_WARM_UP, Comparison, request_of
from lib_onediff.ui.compare.markup import card_html, images_html, numbers_html, summary_html, verdict
from lib_onediff.ui.compare.report import page_html, save
from lib_onediff.ui.compare.sides import CURRENT, OFF, Side, choices, side_of
from lib_onediff.ui.compare.text_to_image import GeneratedImage

PRESETS = {"Careful": {"backend": "eager"}}
FIELDS = ("a fox", "", 160, 128, 20, 7, "Euler a", 7, 2, True)


# --- the two settings ---------------------------------------------------------------------------------------------


def test_sides_by_name() -> None:
    standing = Settings(backend="cudagraph", memory_budget=5)
    presets = lambda: PRESETS  # noqa: E731
    assert choices(presets) == [CURRENT, OFF, "Careful"]
    assert side_of(CURRENT, "", standing, presets).settings == standing
    assert side_of(OFF, "", standing, presets).settings == Settings(enabled=False, backend="cudagraph", memory_budget=5)
    assert side_of("Careful", None, standing, presets).settings == Settings(backend="eager", memory_budget=5)
    assert side_of(OFF, "warp 9", standing, presets).name == OFF, "what cannot be seen there does not count"
    changed = side_of("Careful", " low_bit_only on ", standing, presets)
    assert changed.settings.low_bit_only and changed.name == "Careful + low_bit_only on"
    with pytest.raises(ValueError, match="no settings called 'careful'. Did you mean 'Careful'?"):
        side_of("careful", "", standing, presets)


@pytest.mark.parametrize("text, expected", [
    ("", {}), ("off", {"enabled": False}), ("backend eager", {"backend": "eager"}),
    ("OneDiff: on; backend eager; verify off; low_bit fp8", {"enabled": True, "backend": "eager", "low_bit": "fp8"}),
    ("backend = eager\nlow_bit=fp8;", {"backend": "eager", "low_bit": "fp8"}),
])
def test_changes_as_infotext_has_them(text: str, expected: dict[str, Any]) -> None:
    assert read_changes(text) == expected


@pytest.mark.parametrize("text, part", [
    ("speed 9", "no option 'speed' for a run. Choose from enabled, "),
    ("deepcache_intervall 3", "Did you mean 'deepcache_interval'"), ("LOW_BIT on", "Did you mean 'low_bit'"),
    ("low_bit", "low_bit needs a value: off, auto, int8, fp8."),
    ("backend warp", "backend does not take 'warp'; it takes auto, native"),
    ("low_bit_only maybe", "it takes on, off"), ("memory_budget 9", "no option"),
])
def test_wrong_changes_get_a_sentence(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        read_changes(text)


# --- the request --------------------------------------------------------------------------------------------------


def test_request_of_the_fields() -> None:
    request = request_of(SIDES, *FIELDS)
    assert (request.order.width, request.order.seed, request.images, request.warm_up) == (160, 7, 2, True)
    seeds = {request_of(SIDES, *FIELDS[:7], -1, 2, True).order.seed for _ in range(3)}
    assert len(seeds) == 3 and all(0 <= seed < 2**32 for seed in seeds)


@pytest.mark.parametrize("place, value, part", [
    (2, 65, "multiple of 8"), (3, None, "The height is empty; type a whole"), (4, 0, "number of steps is from 1"),
    (5, "x", "CFG scale must be a number"), (5, 99, "CFG scale is from 1 to 30, not 99"),
    (5, float("nan"), "CFG scale is from"), (7, -2, "The seed is from 0"), (8, 9, "number of images is from 1 to 8"),
])
def test_wrong_fields_get_a_sentence(place: int, value: Any, part: str) -> None:
    fields = [*FIELDS]
    fields[place] = value
    with pytest.raises(ValueError, match=part):
        request_of(SIDES, *fields)


# --- making the images --------------------------------------------------------------------------------------------


def test_images_are_made_in_turn_and_compared() -> None:
    painter = Painter(lambda settings: 0.5 if settings.enabled else 1.0)
    job = Comparison(a_request(), painter, exclusively)
    assert job.wait(SECONDS) and job.state == "done"
    made = [(order.seed, order.steps, settings.enabled) for order, settings in painter.orders]
    warm = STEPS_TO_WARM_UP
    assert made == [(7, warm, False), (7, warm, True), (7, 20, False), (7, 20, True), (8, 20, True), (8, 20, False)]
    assert [pair.seed for pair in job.pairs] == [7, 8]
    assert all(pair.comparison.washed_out and pair.first.status["route"] == "host" for pair in job.pairs)
    assert job.progress()[0] == 1.0


def test_failure_is_a_sentence_and_keeps_what_there_is() -> None:
    job = Comparison(a_request(order=type(ORDER)(**{**vars(ORDER), "prompt": "fail"})), Painter(), exclusively)
    assert job.wait(SECONDS) and (job.state, job.pairs) == ("failed", ())
    assert job.problem == "The image could not be made: no memory"


def test_cancelled_comparison_stops_the_image_and_makes_no_more() -> None:
    painter = Painter()
    painter.hold.clear()
    job = Comparison(a_request(), painter, exclusively)
    while not painter.orders:
        pass
    assert job.progress() == (0.5 / 6, "warming up 1 of 2")
    job.cancel()
    assert job.wait(SECONDS) and job.state == "cancelled" and len(painter.orders) == 1


def test_same_settings_give_the_same_image() -> None:
    job = Comparison(a_request(sides=(SIDES[1], SIDES[1]), images=1, warm_up=False), Painter(), exclusively)
    assert job.wait(SECONDS) and job.pairs[0].comparison.identical


# --- showing them -------------------------------------------------------------------------------------------------


def test_markup_has_images_numbers_and_no_markup_of_others() -> None:
    pair = a_pair(kept=0.5)
    markup = images_html(pair, SIDES) + summary_html([pair], SIDES, True) + numbers_html([pair])
    assert markup.count('src="data:image/png;base64,') == 3
    assert 'type="range"' in markup and "aria-label" in markup
    assert "The right image is paler: saturation -4" in markup and 'class="onediff-pale"' in markup
    assert "To compare times too, set Images to 3 or more." in markup and "times as fast" not in markup
    assert "Off: the WebUI&#x27;s own" in markup


def test_verdict_over_several_seeds() -> None:
    assert "The right images are paler, in 1 of 2 seeds." in verdict([a_pair(7), a_pair(8, 0.5)], True)
    assert verdict([a_pair(7), a_pair(8)], True).startswith("Identical: every pixel of every image")
    assert verdict([a_pair(7, 0.995), a_pair(8)], True).startswith("Seed 7 differs most. ")


TOO_FEW, TOO_FEW_COLD = (f"To compare times too, set Images to {images} or more." for images in (3, 4))


def timed(seconds: list[tuple[float, float]]) -> list[Any]:
    """A pair for each, of which only the times count."""
    pair = a_pair(7)
    return [replace(pair, first=replace(pair.first, seconds=left), second=replace(pair.second, seconds=right))
            for left, right in seconds]


@pytest.mark.parametrize(("warmed_up", "seconds", "says"), [
    (True, [(7.95, 1.0)], TOO_FEW), (False, [(7.95, 1.0)], TOO_FEW_COLD),
    (False, [(9, 1), (2, 1), (2, 1)], TOO_FEW_COLD),
    (False, [(9, 1), (2, 1), (2.2, 1), (2.4, 1)],
     "The right side is 2.20 times as fast as the left (2.00 to 2.40, 3 images of each)."),
    (True, [(1, 2), (1, 2), (1, 2)],
     "The left side is 2.00 times as fast as the right (2.00 to 2.00, 3 images of each)."),
    (True, [(5.6, 1), (0.84, 1), (1.2, 1)], "Neither side is measurably faster."),
])
def test_how_times_compare(warmed_up: bool, seconds: list[tuple[float, float]], says: str) -> None:
    assert verdict(timed(seconds), warmed_up).endswith(f" {says}")


# --- keeping them -------------------------------------------------------------------------------------------------


def test_report_needs_nothing_else(tmp_path: Path) -> None:
    pairs = [a_pair(7), a_pair(8, 0.5)]
    files = save(a_request(), pairs, "the <machine>", tmp_path / "new")
    again = save(a_request(), pairs, "the <machine>", tmp_path / "new")
    assert len({*files, *again}) == 6 and sorted(tmp_path.glob("new/*")) == sorted([*files, *again])
    text = files[0].read_text(encoding="utf-8")
    assert "a &lt;b&gt;fox&lt;/b&gt;" in text and "<b>fox" not in text and "the &lt;machine&gt;" in text
    assert text.count('src="data:') == 6 and "http" not in text.replace("http-equiv", "")
    assert text.count("<style>") == 2 and "onediff-frame" in text and "@media" not in text
    image = Image.open(files[2])
    assert image.size == (3 * 160 + 2 * 8, 128)
    told = json.loads(image.info["OneDiff comparison"])
    assert told["washed_out"] is True and told["seed"] == 8 and told["order"]["seed"] == 8
    assert [side["settings"] for side in told["sides"]] == ["off", "on"]
    assert image.info["OneDiff consistency"] == "the <machine>"
    assert "Seed: 8" in image.info["parameters"]


def test_images_in_the_report_are_the_images() -> None:
    import base64

    pair = a_pair()
    text = page_html(a_request(), [pair], "")
    data = base64.b64decode(text.split('src="data:image/png;base64,')[1].split('"')[0])
    assert Image.open(io.BytesIO(data)).tobytes() == pair.first.image.tobytes()


# --- the page -----------------------------------------------------------------------------------------------------


@pytest.fixture
def panel(tmp_path: Path) -> Iterator[ComparePanel]:
    yield ComparePanel(
        Painter(), exclusively, Settings, dict, lambda: {"Machine": {"GPU": "none"}}, lambda: tmp_path / "out"
    )


def test_following_shows_all_of_it(panel: ComparePanel) -> None:
    shown: list[Any] = [None] * 10
    cancel = []
    for values in panel.follow(OFF, "", CURRENT, "", *FIELDS):
        shown = [old if new == gradio.update() else new for old, new in zip(shown, values, strict=True)]
        cancel.append(shown[-1]["interactive"])
    assert cancel == [True] * (len(cancel) - 1) + [False]
    told, summary, seeds, images, numbers, saving, saved, files, job, _ = shown
    assert told == "" and "Identical" in summary and images.count("<img") == 3 and numbers.count("<tr") == 3
    assert seeds["choices"] == ["Seed 7", "Seed 8"] and seeds["visible"] is True and saving["visible"] is True
    assert panel.choose("Seed 8", job) != images and panel.choose("Seed 9", job) == gradio.update()
    assert saved == "" and files["visible"] is False, "what was saved before is of another comparison"
    told, files = panel.save(job)
    assert "Saved out/" in told and "2 PNGs" in told
    assert [Path(file).suffix for file in files["value"]] == [".html", ".png", ".png"] and files["visible"] is True
    assert "Nothing is being compared" in panel.cancel(job)


def test_lists_offer_presets_that_were_made_since(panel: ComparePanel) -> None:
    panel.presets = lambda: PRESETS
    assert [offered["choices"] for offered in panel.refresh()] == [[CURRENT, OFF, "Careful"]] * 2
    *_, last = panel.follow("Careful", "", OFF, "", *FIELDS)
    assert [side.described for side in last[-2].request.sides] == ["on; backend eager", "off"]


def test_wrong_input_is_said_at_once(panel: ComparePanel) -> None:
    (values,) = panel.follow(OFF, "", CURRENT, "warp 9", *FIELDS)
    assert "no option" in values[0] and all(value == gradio.update() for value in values[1:])
    panel.standing = lambda: Settings(enabled=False)
    (values,) = panel.follow(OFF, "", CURRENT, "", *FIELDS)
    assert "switched off in the settings. Switch it on" in values[0]
    assert "nothing to save" in panel.save(None)[0]


def test_without_scikit_image_no_image_is_made_and_a_sentence_says_why(
    panel: ComparePanel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "skimage", None)
    (values,) = panel.follow(OFF, "", CURRENT, "", *FIELDS)
    assert "scikit-image" in values[0] and "pip install scikit-image" in values[0] and "<" not in values[0][4:-5]
    assert all(value == gradio.update() for value in values[1:]) and not panel.maker.orders


def test_folder_that_cannot_be_used_gets_a_sentence(panel: ComparePanel, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    *_, last = panel.follow(OFF, "", CURRENT, "", *FIELDS)
    told, _ = panel.save(last[-2])
    assert "could not be saved" in told and str(tmp_path) not in told


def test_other_machine_is_compared(panel: ComparePanel) -> None:
    assert panel.differences("") == ""
    assert "Nothing differs" in panel.differences(panel.report())
    told = panel.differences(panel.report().replace("none", "<b>RTX</b>"))
    assert "1 fact differs." in told and "there &lt;b&gt;RTX&lt;/b&gt;" in told
    assert "no consistency report" in panel.differences("hello")


def test_pages_are_built_for_every_page_anew(panel: ComparePanel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_tab, "sampler_names", lambda: ["Euler a"])
    with gradio.Blocks() as page:
        for _ in range(2):
            with gradio.Tab("Compare") as tab:
                compare_tab.build_compare_page(panel, tab.select)
            with gradio.Tab("Consistency") as tab:
                compare_tab.build_facts_page(panel, tab.select)
    handlers = page.get_config_file()["dependencies"]
    saved = (gradio.Textbox, gradio.Dropdown, gradio.Button, gradio.Number, gradio.Checkbox, gradio.Radio)
    ours = [block for block in page.blocks.values() if isinstance(block, saved)]
    assert ours and all(block.do_not_save_to_config for block in ours)
    assert all(handler["api_name"] is False and handler["queue"] is False for handler in handlers)
    assert not any(handler["types"]["generator"] for handler in handlers)


def test_a_card_tells_what_rests_though_it_is_chosen() -> None:
    resting = "Output forecast rests: Euler a adds noise"
    status = {
        "route": "plain", "step_ms": 12.3, "reason": "no graph here", "forecast": {"calls": 0, "reason": resting},
    }
    made = GeneratedImage(image_of(1), "", 1.0, status)
    side = Side("mine", Settings(deepcache_interval=3, deepcache_depth=0))
    assert f"<dt>Why</dt><dd>no graph here; {resting}</dd>" in card_html("Left", side, [made])
    reusing = GeneratedImage(image_of(1), "", 1.0, {**status, "deepcache": {"reused": "Euler a adds noise"}})
    told = card_html("Left", side, [reusing])
    assert "; DeepCache reuses deep layers instead of extrapolating them: Euler a adds noise</dd>" in told
    off = Side("off", Settings(enabled=False))
    assert "Why" not in card_html("Left", off, [made])

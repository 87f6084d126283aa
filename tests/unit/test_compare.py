"""The Compare page without a WebUI: reading the txt2img tab, making the images, and showing them."""
from __future__ import annotations

import html
import json
import logging
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("gradio")
pytest.importorskip("PIL")

import gradio
import torch
from busy import until
from PIL import Image
from quality_images import desaturated, painted

from lib_onediff.core.jobs import JobQueue
from lib_onediff.core.quality import compare
from lib_onediff.core.settings import Settings
from lib_onediff.ui.compare.job import (
    CURRENT,
    MOST_WARM_UPS,
    OFF,
    Comparison,
    Comparisons,
    GeneratedImage,
    Pair,
    Request,
    Side,
    arguments_of_run,
    request_of,
    side_of,
)
from lib_onediff.ui.compare.report import speed_of_right
from lib_onediff.ui.compare.tab import ComparePanel
from lib_onediff.ui.compare.viewer import difference_of
from lib_onediff.ui.presets import PRESETS
from lib_onediff.ui.run_settings import settings_of_run

SIDES = (Side(OFF, Settings(enabled=False)), Side(CURRENT, Settings()))
FIRST: Request = {
    "prompt": "a <b>fox</b>", "negative_prompt": "blurry & dark", "seed": 7, "width": 160, "height": 128, "steps": 20,
    "cfg_scale": 7.0, "sampler_name": "Euler a", "scheduler": "Automatic",
}
SECONDS = 20
NOTHING_TO_SAY = ("", "", "")


def fields(**values: Any) -> str:
    """The txt2img tab's fields as the page sends them, in JSON. values: fields that differ from an image of a fox."""
    asked = {
        "prompt": "a fox", "neg_prompt": "", "width": "160", "height": "128", "steps": "20", "cfg_scale": "7",
        "sampling": "Euler a", "seed": "7",
    }
    return json.dumps({**asked, **values})


class Painter:
    """A TextToImage that paints images without a WebUI. kept: the share of colour that images with OneDiff keep."""

    def __init__(self, kept: float = 1.0) -> None:
        self.kept = kept
        self.made: list[tuple[Request, Settings]] = []

    def interrupt(self) -> None:
        """Does nothing: each image is finished immediately."""

    def share_of_image(self) -> float:
        return 0.5

    def make(self, request: Request, settings: Settings) -> GeneratedImage:
        self.made.append((request, settings))
        if request["prompt"] == "fail":
            raise RuntimeError("no memory\nfor this")
        painting = desaturated(painted(request["seed"]), self.kept if settings.enabled else 1.0)
        values = (painting.clamp(0, 1) * 255).round()
        status = {"route": "plain" if settings.enabled else "host", "step_ms": 12.3, "reason": "no <graph> here"}
        return GeneratedImage(Image.fromarray(values.to(torch.uint8).numpy()), 2.0 - settings.enabled, status)


def exclusively(work: Callable[[], Any]) -> Any:
    return work()


def a_pair(seconds: tuple[float, float]) -> Pair:
    left, right = (
        replace(Painter().make(FIRST, side.settings), seconds=took) for side, took in zip(SIDES, seconds, strict=True)
    )
    return Pair(FIRST["seed"], (left, right), compare(left.image, right.image))


# --- reading the txt2img tab ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, value, part", [
    ("width", 65, "multiple of 8"), ("height", "", "The height must be a number"),
    ("steps", "0", "steps must be from 1"),
    ("cfg_scale", "x", "CFG scale must be a number"), ("cfg_scale", "nan", "CFG scale must be from 1 to 30"),
    ("seed", "-2", "The seed must be from -1"), ("steps", "1.5", "whole number"),
])
def test_an_invalid_field_of_the_txt2img_tab_is_refused_by_name(name: str, value: Any, part: str) -> None:
    """name, value: the field. part: a part of the message. JSON that is not an object is refused, too."""
    with pytest.raises(ValueError, match=part):
        request_of(fields(**{name: value}))
    with pytest.raises(ValueError, match="cannot be read"):
        request_of("[1]")


def test_the_fields_of_the_txt2img_tab_become_a_request() -> None:
    """Seed -1 becomes a random seed, a different one each time."""
    assert request_of(fields(scheduler="Karras")) == {
        **FIRST, "prompt": "a fox", "negative_prompt": "", "scheduler": "Karras",
    }
    seeds = {request_of(fields(seed="-1"))["seed"] for _ in range(3)}
    assert len(seeds) == 3 and min(seeds) >= 0


# --- making the images --------------------------------------------------------------------------------------------


def over(queue: JobQueue) -> Comparison:
    """The newest comparison, once no job runs or waits."""
    until(lambda: not any(job.pending for job in queue.jobs()), queue.jobs, SECONDS, 0.01)
    job = queue.jobs()[-1]
    assert isinstance(job, Comparison)
    return job


def run(painter: Painter, images: int, request: Request = FIRST) -> Comparison:
    queue = JobQueue()
    Comparisons(painter, exclusively, queue).add(SIDES, request, images, "")  # type: ignore[arg-type]
    return over(queue)


def test_left_and_right_alternate_in_being_made_first_and_each_pair_is_compared() -> None:
    """There are 6 images: one of each side as a warm-up, then two pairs. With OneDiff, the Painter drops half of the
    colour, so that each comparison must report washed_out."""
    painter = Painter(0.5)
    job = run(painter, 2)
    assert (job.state, job.share, job.done, job.total) == ("done", 1.0, 120, 120) and job.made == job.wanted == 6
    made = [(request["seed"], request["steps"], settings.enabled) for request, settings in painter.made]
    assert made == [(7, 20, False), (7, 20, True), (7, 20, False), (7, 20, True), (8, 20, True), (8, 20, False)]
    assert [pair.seed for pair in job.pairs] == [7, 8]
    for pair in job.pairs:
        assert pair.comparison.washed_out and [image.status["route"] for image in pair.images] == ["host", "plain"]


@pytest.mark.parametrize(("first_uses", "warm_ups"), [((1, 0), 2), ((0,), 1), ((5,) * 9, MOST_WARM_UPS)], ids=str)
def test_a_side_is_warmed_up_until_an_image_uses_no_shape_for_the_first_time(
    first_uses: tuple[int, ...], warm_ups: int
) -> None:
    """Warm-up images have all steps, because DeepCache is inactive in a short sampling. first_uses: how many shapes
    each image of the right side uses for the first time. warm_ups: how many warm-up images that side gets."""
    painter = Painter()
    counts = list(first_uses)
    make = Painter.make

    def make_and_tell(request: Request, settings: Settings) -> GeneratedImage:
        made = make(painter, request, settings)
        uses = counts.pop(0) if settings.enabled and counts else 0
        return replace(made, status={**made.status, "image": {"first_uses": uses}})

    painter.make = make_and_tell  # type: ignore[method-assign]
    job = run(painter, 1)
    assert [settings.enabled for _, settings in painter.made] == [False, *[True] * warm_ups, False, True]
    assert {request["steps"] for request, _ in painter.made} == {20}
    assert job.made == job.wanted == 3 + warm_ups and len(job.pairs) == 1


def test_a_failed_comparison_gives_the_first_line_of_the_error_as_its_reason() -> None:
    logging.getLogger("onediff").propagate = False
    job = run(Painter(), 1, {**FIRST, "prompt": "fail"})
    assert (job.state, job.reason, job.pairs) == ("failed", "no memory", [])


# --- showing them ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "says"), [
    ([(7.95, 1.0)], ""), ([(2, 1), (2.2, 1), (2.4, 1)], "2.2x faster"), ([(1, 2), (1, 2), (1, 2)], "2.0x slower"),
    ([(5.6, 1), (0.84, 1), (1.2, 1)], "no measurable difference"),
])
def test_with_three_or_more_pairs_the_right_sides_speed_is_given_in_words(
    seconds: list[tuple[float, float]], says: str
) -> None:
    """Ratios of seconds that scatter about 1 are no measurable difference. seconds: (left, right) of each pair. says:
    the words; none for fewer pairs."""
    assert speed_of_right([a_pair(each) for each in seconds]) == says


def test_the_difference_map_amplifies_small_differences() -> None:
    """A difference of 3 (of 255) is shown as 192, 64 times as bright. The caption gives the factor; for equal images,
    it says that no pixel differs."""
    grey = Image.new("RGB", (24, 16), (128, 128, 128))
    changed = grey.copy()
    changed.putpixel((6, 4), (131, 131, 131))
    difference, caption = difference_of(grey, changed)
    assert difference.getpixel((6, 4)) == (192, 192, 192) and difference.getpixel((5, 4)) == (0, 0, 0)
    assert caption == "Difference times 64" and difference_of(grey, grey)[1] == "No pixel differs"


# --- the page -----------------------------------------------------------------------------------------------------


def a_panel(painter: Painter, **values: Any) -> ComparePanel:
    queue = JobQueue()
    comparisons = Comparisons(painter, values.pop("exclusively", exclusively), queue)  # type: ignore[arg-type]
    return ComparePanel(comparisons, queue, Settings, lambda *given: settings_of_run(given, Settings()))


def shown_seeds(numbers: str) -> list[dict[str, Any]]:
    """The seeds in the data for the viewer. numbers: the page's markup."""
    (shown,) = re.findall('data-onediff-compared="([^"]*)"', numbers)
    return json.loads(html.unescape(shown))["seeds"]


def test_without_scikit_image_the_page_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    logging.getLogger("onediff").propagate = False
    monkeypatch.setitem(sys.modules, "skimage", None)
    panel = a_panel(Painter())
    assert panel.begin(OFF, "", CURRENT, "", 2, fields()) == NOTHING_TO_SAY
    over(panel.queue)
    assert "pip install scikit-image" in panel.look("{}", "")[0]


def test_a_second_comparison_waits_for_the_first_and_can_be_cancelled_alone() -> None:
    """The same comparison is not queued twice: a second click gets a message. A page that shows no comparison gets the
    newest finished one; a page that shows it already gets no change."""
    turn = threading.Lock()

    def in_turn(work: Callable[[], Any]) -> Any:
        with turn:
            return work()

    panel = a_panel(Painter(), exclusively=in_turn)
    with turn:
        assert panel.begin(OFF, "", CURRENT, "", 1, fields()) == NOTHING_TO_SAY
        assert "is not queued again" in panel.begin(OFF, "", CURRENT, "", 1, fields())[2]
        assert panel.begin(OFF, "", "Fast", "", 1, fields()) == NOTHING_TO_SAY
        until(lambda: panel.queue.jobs()[0].state == "running", "the first to run", SECONDS, 0.01)
        first, second = panel.queue.jobs()
        assert second.what == "waits for the comparison Off and Current settings"
        assert panel.look(json.dumps({"cancelled": [second.id]}), "")[1:3] == (gradio.update(), gradio.update())
    over(panel.queue)
    states = {job.title: job.state for job in panel.queue.jobs()}
    assert states == {"Off and Current settings": "done", "Off and Fast": "cancelled"}
    markup, numbers, images, seen = panel.look("{}", "")
    assert "Compare Off and Fast" in markup and "Left: Off" in numbers and len(images) == 3
    assert panel.look("{}", seen)[1:] == (gradio.update(),) * 3
    assert panel.look('{"clear": true}', seen)[0] == "" and panel.queue.jobs() == []


def test_the_first_image_is_shown_before_the_second_is_made() -> None:
    """The Painter waits before the second image. The page shows the left image without a verdict, and later both images
    under new names, so that no browser shows the early one from its cache."""
    painter = Painter()
    make = Painter.make
    go = threading.Event()

    def make_the_second_later(request: Request, settings: Settings) -> GeneratedImage:
        if painter.made:
            assert go.wait(SECONDS)
        return make(painter, request, settings)

    painter.make = make_the_second_later  # type: ignore[method-assign]
    panel = a_panel(painter)
    panel.begin(OFF, "", CURRENT, "", 1, fields())
    until(lambda: panel.look("{}", "")[3] != gradio.update(), "an image", SECONDS, 0.01)
    markup, numbers, images, _ = panel.look("{}", "")
    assert "“a fox”" in numbers and "Verdict" not in numbers
    (early,) = shown_seeds(numbers)
    assert list(early["images"]) == ["left"] and early["verdict"] == "" and "step 30 of 80" in markup
    assert [caption for _, caption in images] == [early["images"]["left"]]
    go.set()
    over(panel.queue)
    _, numbers, images, _ = panel.look("{}", "")
    (measured,) = shown_seeds(numbers)
    assert [caption for _, caption in images] == list(measured["images"].values()) and measured["verdict"]
    assert early["images"]["left"] not in measured["images"].values(), "the second left image has a new name"


@pytest.mark.parametrize(("choice", "changes", "says"), [
    (OFF, "low_bit fp8", "Left: 'low_bit fp8' has no effect where OneDiff is off"), (CURRENT, "nonsense 5", "nonsense"),
    ("Turbo", "", "no preset 'Turbo'"),
])
def test_invalid_settings_get_a_message_below_their_side_and_nothing_is_queued(
    choice: str, changes: str, says: str
) -> None:
    """choice: the left side's preset. changes: the left side's other options. The right side is invalid, too."""
    panel = a_panel(Painter())
    left, right, both = panel.begin(choice, changes, CURRENT, "turbo 3", 1, fields())
    assert says in html.unescape(left) and "Right: OneDiff has no option 'turbo'" in html.unescape(right)
    assert both == "" and panel.queue.jobs() == []


@pytest.mark.parametrize(("left", "right", "held", "says"), [
    (OFF, CURRENT, {"enabled": False}, "Both sides are made without OneDiff."),
    ("Fast", CURRENT, {"preset": "Fast"}, "Both sides have the same settings."),
])
def test_two_sides_with_the_same_settings_are_compared_and_a_message_says_so(
    left: str, right: str, held: dict[str, Any], says: str
) -> None:
    """left, right: the choices of both sides. held: fields of the OneDiff accordion, which CURRENT reads."""
    panel = a_panel(Painter())
    assert says in panel.begin(left, "", right, "", 1, fields(**held))[2]
    assert over(panel.queue).pairs


def test_current_settings_are_those_of_the_accordion() -> None:
    """The page sends the fields of txt2img's OneDiff accordion with those of the tab. An unknown preset among them gets
    a message."""

    def current(**held: Any) -> Settings:
        given = arguments_of_run(fields(**held))
        return side_of(CURRENT, "", lambda: settings_of_run(given, Settings()), Settings()).settings

    assert current() == Settings()
    assert current(preset="Balanced", changes="backend eager") == replace(
        Settings(), **PRESETS["Balanced"].values, backend="eager",
    )
    assert not current(enabled=False).enabled
    message = a_panel(Painter()).begin(OFF, "", CURRENT, "", 1, fields(preset="Turbo"))[1]
    assert "Right: in the OneDiff accordion of the txt2img tab: OneDiff has no preset" in message

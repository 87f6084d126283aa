"""DeepCache in a WebUI: the deep part is computed exactly as scheduled, and nothing of it stays behind."""
from __future__ import annotations

from typing import Any

import pytest
from webui_client import PICTURE, Pictures, WebUI, gradient, largest_difference, one_run, start_from
from webui_models import Models

pytestmark = pytest.mark.usefixtures("sd15")
EVERY_THIRD = {"deepcache_interval": 3}
# Below 10 steps it rests.
THIRTEEN = {"steps": 13, "sampler_name": "Euler", "negative_prompt": "snow"}
LONG = "a red fox in the snow and " * 20


def passes(webui: WebUI) -> tuple[int, int]:
    counted = webui.status()["deepcache"]
    return counted["full"], counted["cached"]


def made(webui: WebUI, options: dict[str, Any], **request: Any) -> tuple[Pictures, tuple[int, int]]:
    """Pictures, and how many full and cached passes they took."""
    before = passes(webui)
    pictures = webui.make({**PICTURE, **THIRTEEN, **request, **one_run(**options)})
    return pictures, tuple(after - then for after, then in zip(passes(webui), before, strict=True))


@pytest.fixture(scope="module")
def exact(webui: WebUI, models: Models) -> Pictures:
    """The whole UNet's image."""
    models.use("sd15")
    return made(webui, {})[0]


@pytest.mark.parametrize(("interval", "expected"), [
    (1, (0, 0)), (2, (8, 5)), (3, (6, 7)), (5, (4, 9)), (20, (2, 11)),
])
def test_the_deep_part_is_computed_as_scheduled(
    webui: WebUI, exact: Pictures, interval: int, expected: tuple[int, int]
) -> None:
    pictures, counted = made(webui, {"deepcache_interval": interval})
    assert counted == expected
    assert (largest_difference(pictures, exact) > 0) is (interval > 1)
    again, _ = made(webui, {"deepcache_interval": interval})
    assert largest_difference(again, pictures) == 0


def whole_of(steps: int) -> int:
    """As many whole steps as at equal distances, but early; and the last one."""
    return -(-steps // 3) + 1


# How often a sampler calls the UNet is the host's own business: A1111's DDIM does once less than it is asked for, and
# its UniPC once more, after the last step.
@pytest.mark.parametrize(("sampler", "twice"), [
    ("Euler a", False), ("DPM++ 2M", False), ("UniPC", False), ("Heun", True), ("DDIM", False),
])
def test_every_sampler_keeps_to_the_schedule(webui: WebUI, sampler: str, twice: bool) -> None:
    _, (full, shallow) = made(webui, EVERY_THIRD, sampler_name=sampler)
    steps = (full + shallow + 1) // 2 if twice else full + shallow
    assert steps in (12, 13, 14)
    assert full == (2 * whole_of(steps) - 1 if twice else whole_of(steps))


@pytest.mark.parametrize("request_of", [
    {"prompt": LONG}, {"batch_size": 2}, {"cfg_scale": 2.5}, {"prompt": "a fox AND a hill"},
    {"width": 72, "height": 88},
], ids=str)
def test_batches_and_prompts_of_every_kind(webui: WebUI, request_of: dict[str, Any]) -> None:
    _, (full, shallow) = made(webui, EVERY_THIRD, **request_of)
    # A host may call once for the prompt and once for the negative prompt.
    assert (full, shallow) in ((6, 7), (12, 14))


def test_img2img_counts_its_own_steps(webui: WebUI) -> None:
    start = webui.img2img(gradient(64, 64)).image
    _, (full, shallow) = made(webui, EVERY_THIRD, **{**start_from(start), "steps": 24})
    steps = full + shallow
    assert 12 <= steps <= 18
    assert full == whole_of(steps)


@pytest.mark.parametrize(("few", "reason"), [
    ({"steps": 7}, "fewer than 10 steps"), ({"steps": 13, "cfg_scale": 1.5}, "few-step models"),
])
def test_few_steps_are_whole(webui: WebUI, few: dict[str, Any], reason: str) -> None:
    exact, _ = made(webui, {}, **few)
    pictures, counted = made(webui, EVERY_THIRD, **few)
    assert counted == (0, 0) and largest_difference(pictures, exact) == 0
    assert reason in webui.status()["deepcache"]["reason"]


def test_without_guidance_steps_count_that_few_step_models_do_not_have(webui: WebUI) -> None:
    _, (full, shallow) = made(webui, EVERY_THIRD, steps=16, cfg_scale=1.0)
    # A1111 and others compute the negative prompt too.
    assert (full, shallow) in ((7, 9), (14, 18))


def test_nothing_stays_behind(webui: WebUI, exact: Pictures) -> None:
    pictures, _ = made(webui, {**EVERY_THIRD, "deepcache_depth": 3})
    after, counted = made(webui, {})
    assert counted == (0, 0) and largest_difference(after, exact) == 0
    assert largest_difference(pictures, exact) > 0
    assert "deepcache_interval 3" in pictures.info["infotexts"][0]
    assert "deepcache" not in after.info["infotexts"][0]


@pytest.mark.parametrize("options", [
    {"deepcache_interval": 0}, {"deepcache_depth": 12},
], ids=str)
def test_a_value_that_makes_no_sense_is_told(webui: WebUI, options: dict[str, Any]) -> None:
    _, counted = made(webui, options)
    assert counted == (0, 0)
    # Not every host hands a script's comment on to the API.
    assert "OneDiff is off for this run" in webui.status()["reason"]

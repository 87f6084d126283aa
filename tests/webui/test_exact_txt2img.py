"""txt2img with the extension on and off: the same pictures, every UNet call by the whole-UNet route."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from webui_client import WebUI
from webui_compare import assert_different, need, on_and_off, run_on, steps_of
from webui_models import Models, stem

# One token a word in every tokenizer; a chunk takes 75.
LETTERS = "a b c d e f g h i j k l m n o p q r s t u v w x y z "
WORDS_50, WORDS_110, WORDS_190 = (" ".join((LETTERS * 8).split()[:count]) for count in (50, 110, 190))
# The architectures beside SD1.5 get the cases in which they differ from it.
ELSEWHERE = {
    "64x64", "72x88", "192x64", "batch 2", "231 tokens, short negative", "AND of two", "cfg 1", "DPM++ SDE",
}


@dataclass(frozen=True)
class Case:
    """A request, by what differs from PICTURE.

    needs: a feature that some host lacks. fewer_calls: how many calls less than steps the sampler makes.
    parted: the prompts are of different token counts, which some hosts give to the UNet in two calls.
    """

    name: str
    request: dict[str, Any] = field(default_factory=dict)
    needs: str = ""
    fewer_calls: int = 0
    parted: bool = False

    def least_calls(self, webui: WebUI) -> int:
        calls = steps_of(self.request) - self.fewer_calls
        return 2 * calls if self.parted and webui.kind == "a1111" else calls


def prompts(prompt: str, negative_prompt: str) -> dict[str, str]:
    return {"prompt": prompt, "negative_prompt": negative_prompt}


def size(width: int, height: int) -> Case:
    return Case(f"{width}x{height}", {"width": width, "height": height})


def sampler(name: str, fewer_calls: int = 0) -> Case:
    return Case(name, {"sampler_name": name, "steps": 4}, fewer_calls=fewer_calls)


CASES = [
    size(64, 64),
    size(128, 128),
    size(72, 88),
    size(88, 72),
    size(192, 64),
    Case("batch 2", {"batch_size": 2}),
    Case("two batches", {"n_iter": 2}),
    Case("two batches of 2 at 72x88", {"n_iter": 2, "batch_size": 2, "width": 72, "height": 88}),
    Case("77 tokens, short negative", prompts(WORDS_50, "rain")),
    Case("154 tokens, short negative", prompts(WORDS_110, "rain"), parted=True),
    Case("231 tokens, short negative", prompts(WORDS_190, "rain"), parted=True),
    Case("77 tokens, long negative", prompts("a fox", WORDS_110), parted=True),
    Case("154 tokens, long negative", prompts(WORDS_110, WORDS_110[::-1])),
    Case("231 tokens, long negative", prompts(WORDS_190, WORDS_190[::-1])),
    Case("231 tokens, 154 of negative", prompts(WORDS_190, WORDS_110), parted=True),
    Case("231 tokens, batch 2", {**prompts(WORDS_190, "rain"), "batch_size": 2}, parted=True),
    Case("AND of two", prompts("a fox :1.1 AND a castle at night :0.7", "rain"), needs="AND prompts"),
    Case("AND of three", prompts("a fox AND a castle AND a sea", "rain"), needs="AND prompts"),
    Case("AND of long and short", prompts(f"a fox AND {WORDS_110}", "rain"), needs="AND prompts"),
    Case("cfg 1", {"cfg_scale": 1}),
    Case("cfg 1 with a long prompt", {"cfg_scale": 1, **prompts(WORDS_110, "rain")}),
    sampler("Euler a"),
    sampler("DPM++ 2M"),
    sampler("DPM++ SDE"),
    sampler("Heun"),
    sampler("DDIM", fewer_calls=1),
    sampler("UniPC"),
    sampler("LCM"),
    Case("tiling", {"tiling": True}, needs="tiling"),
    Case("tiling at 72x88", {"tiling": True, "width": 72, "height": 88}, needs="tiling"),
]


def check(webui: WebUI, case: Case) -> None:
    if case.needs:
        need(webui, case.needs)
    on_and_off(webui, case.request, case.least_calls(webui))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sd15(webui: WebUI, sd15: Models, case: Case) -> None:
    check(webui, case)


@pytest.fixture(scope="module", params=["sdxl", "sd2"])
def other_architecture(request: pytest.FixtureRequest, models: Models) -> Iterator[str]:
    """A checkpoint of another architecture is loaded; SD1.5 again afterwards."""
    name = models.use(request.param)
    infotext = run_on(models.webui, {}).pictures.info["infotexts"][0]
    assert f"Model: {stem(name)}," in infotext, infotext
    yield request.param
    models.use("sd15")


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ELSEWHERE], ids=lambda case: case.name)
def test_other_architectures(webui: WebUI, other_architecture: str, case: Case) -> None:
    check(webui, case)


def test_cases_for_other_architectures_are_cases() -> None:
    assert {case.name for case in CASES} > ELSEWHERE


@pytest.mark.parametrize("change", [
    {"seed": 8},
    {"negative_prompt": "a castle at night"},
    {"prompt": WORDS_110},
    {"prompt": WORDS_190},
    {"tiling": True},
    {"cfg_scale": 1},
], ids=lambda change: next(iter(change)))
def test_what_the_cases_vary_shows_in_the_picture(webui: WebUI, sd15: Models, change: dict[str, Any]) -> None:
    """If these made no difference, a route that ignores them would pass the comparison."""
    if "tiling" in change:
        need(webui, "tiling")
    request = {"prompt": "a fox", "negative_prompt": "rain"}
    assert_different(run_on(webui, request), run_on(webui, {**request, **change}), str(change))


@pytest.mark.parametrize("words, longer", [(WORDS_50, WORDS_110), (WORDS_110, WORDS_190)], ids=["77", "154"])
def test_end_of_a_long_prompt_counts(webui: WebUI, sd15: Models, words: str, longer: str) -> None:
    """A prompt is cut off nowhere, so that the cases of 154 and 231 tokens are what their names say."""
    assert_different(run_on(webui, {"prompt": longer}), run_on(webui, {"prompt": longer[:-1] + "0"}), "the last word")
    assert_different(run_on(webui, {"prompt": words}), run_on(webui, {"prompt": longer}), "the longer prompt")

"""Images with LoRAs match those of the WebUI alone (OneDiff off; no pixel differs by more than 1 of 255), and have no
LoRA of the image before."""
from __future__ import annotations

from collections.abc import Callable

import pytest
from test_exact_images import hires
from webui_client import WebUI
from webui_compare import Run, assert_different, assert_same, assert_same_on_and_off, need, run_off, run_on
from webui_models import Models

PROMPT = "a red fox in the snow"


def with_lora(name: str, weight: float) -> str:
    return f"{PROMPT} <lora:{name}:{weight:g}>"


@pytest.fixture
def lora_a(sd15: Models, webui: WebUI) -> str:
    need(webui, "LoRA")
    return sd15.need("lora-a")


@pytest.fixture
def lora_b(sd15: Models, webui: WebUI) -> str:
    need(webui, "LoRA")
    return sd15.need("lora-b")


def make_all(make: Callable[..., Run], webui: WebUI, prompts: list[str]) -> list[Run]:
    """A run for each of the prompts, in this order. make: run_on or run_off."""
    return [make(webui, {"prompt": prompt}) for prompt in prompts]


def test_images_with_changing_loras_match_those_of_the_webui(webui: WebUI, lora_a: str, lora_b: str) -> None:
    """The images have no LoRA, a, b, a at half weight, or both, in a changing order. All images with OneDiff on are
    made first, so that no run with OneDiff off merges a LoRA into the weights that OneDiff uses. Images of the same
    prompt match, with OneDiff on or off, and another LoRA or another weight in the prompt changes the image."""
    prompts = [
        PROMPT, with_lora(lora_a, 1), with_lora(lora_b, 1), with_lora(lora_a, 0.5), with_lora(lora_a, 1), PROMPT,
        with_lora(lora_b, 1), with_lora(lora_a, 1) + f" <lora:{lora_b}:0.7>", PROMPT,
    ]
    on = make_all(run_on, webui, prompts)
    off = make_all(run_off, webui, prompts)
    for mine, hosts in zip(on, off, strict=True):
        assert_same(mine, hosts)
    none, a, b, half_a, a_again, none_again, b_again, both, none_at_last = on
    for one, other in ((none, a), (none, b), (none, half_a), (a, b), (a, half_a), (both, a), (both, b)):
        assert_different(one, other, "the LoRA")
    for one, other in ((none, none_again), (none, none_at_last), (a, a_again), (b, b_again)):
        assert_same(one, other)


def test_an_image_depends_on_its_lora_alone_while_onediff_is_switched_on_and_off(webui: WebUI, lora_a: str) -> None:
    """Images of the same prompt match, with OneDiff on or off. Runs with OneDiff off merge a LoRA into the weights that
    OneDiff's next run uses, and remove it from them."""
    with_a = {"prompt": with_lora(lora_a, 1)}
    without = {"prompt": PROMPT}
    ours_with_a = run_on(webui, with_a)
    ours_without = run_on(webui, without)
    assert_different(ours_with_a, ours_without, "the LoRA")
    assert_same(run_off(webui, with_a), ours_with_a)
    assert_same(run_on(webui, without), ours_without)
    assert_same(run_on(webui, with_a), ours_with_a)
    assert_same(run_off(webui, without), ours_without)
    assert_same(run_on(webui, with_a), ours_with_a)


@pytest.mark.parametrize("first, second", [("", "b"), ("a", "b"), ("a", ""), ("a", "a")])
def test_an_image_whose_hires_pass_has_another_lora_matches_that_of_the_webui(
    webui: WebUI, lora_a: str, lora_b: str, first: str, second: str
) -> None:
    """first, second: the LoRA of the first pass and of the hires pass, "a", "b", or "" for none."""
    names = {"a": lora_a, "b": lora_b}
    prompts = [with_lora(names[which], 1) if which else PROMPT for which in (first, second)]
    request = hires(webui, "Latent", prompt=prompts[0], hr_prompt=prompts[1])
    on, _ = assert_same_on_and_off(webui, request, least_calls=6)
    if first != second:
        same = run_on(webui, hires(webui, "Latent", prompt=prompts[0], hr_prompt=prompts[0]), 6)
        assert_different(same, on, "the LoRA of the hires pass")


@pytest.mark.parametrize(("role", "checkpoint"), [("locon", "sd15"), ("sdxl-lora", "sdxl")])
def test_images_with_other_kinds_of_loras_match_the_webui_and_the_next_without_is_as_before(
    webui: WebUI, sd15: Models, role: str, checkpoint: str
) -> None:
    """role: the role (see webui_models.py) of the LoRA, which is a LoCon or one for SDXL. Each is used at the usual
    size, and at another size in batches."""
    need(webui, "LoRA")
    name = sd15.need(role)
    sd15.use(checkpoint)
    plain = run_on(webui, {"prompt": PROMPT})
    sizes = {"width": 72, "height": 88, "batch_size": 2, "n_iter": 2}
    for request in ({}, sizes):
        with_it, _ = assert_same_on_and_off(webui, {**request, "prompt": with_lora(name, 1)})
        assert_different(run_on(webui, {**request, "prompt": PROMPT}), with_it, f"the {role}")
    assert_same(run_on(webui, {"prompt": PROMPT}), plain)

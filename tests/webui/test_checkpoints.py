"""Other checkpoints, a refiner and another VAE, between pictures and within one."""
from __future__ import annotations

import pytest
from webui_client import WebUI
from webui_compare import assert_different, assert_same, assert_same_on_and_off, need, run_off, run_on
from webui_models import Models, stem


@pytest.fixture
def switching(webui: WebUI, sd15: Models) -> Models:
    need(webui, "checkpoint switch")
    return sd15


@pytest.mark.parametrize("one, other", [
    ("sd15", "sd15-b"), ("twin", "twin-b"), ("sd15", "inpaint"), ("sd15", "sdxl"), ("sd15", "sd2"),
], ids=lambda role: role)
def test_images_after_switches_of_the_checkpoint_are_the_webuis(
    webui: WebUI, switching: Models, one: str, other: str
) -> None:
    """All images with the extension on come first. Each checkpoint's second image equals its first."""
    made = {}
    for make in (run_on, run_off):
        for index, role in enumerate((one, other, one, other)):
            name = switching.use(role)
            picture = make(webui, {})
            assert f"Model: {stem(name)}," in picture.pictures.info["infotexts"][0]
            made[make, index] = picture
    for index in range(4):
        assert_same(made[run_on, index], made[run_off, index])
    for make in (run_on, run_off):
        assert_same(made[make, 0], made[make, 2])
        assert_same(made[make, 1], made[make, 3])
        assert_different(made[make, 0], made[make, 1], "the checkpoint")


def test_a_checkpoint_for_one_image_gives_the_webuis_and_leaves_the_next_image_as_before(
    webui: WebUI, switching: Models
) -> None:
    plain = run_on(webui, {})
    override = {"override_settings": {"sd_model_checkpoint": switching.need("sd15-b")}}
    other, _ = assert_same_on_and_off(webui, override)
    assert_different(plain, other, "the checkpoint")
    assert_same(run_on(webui, {}), plain)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("base, refiner_role", [("sd15", "sd15-b"), ("sdxl", "sdxl-b"), ("sdxl", "refiner")])
def test_images_with_a_refiner_from_half_of_the_steps_are_the_webuis(
    webui: WebUI, switching: Models, base: str, refiner_role: str, batches: int
) -> None:
    """Also those without it afterwards."""
    need(webui, "refiner")
    refiner = {"refiner_checkpoint": switching.need(refiner_role), "refiner_switch_at": 0.5}
    switching.use(base)
    request = {"steps": 6, "n_iter": batches}
    plain = run_on(webui, request)
    # Neo takes 0.5 for a sigma otherwise, and only the last step would be the refiner's.
    with webui.options(**({"refiner_use_steps": True} if webui.is_neo else {})):
        refined, _ = assert_same_on_and_off(webui, {**request, **refiner})
    assert "Refiner: " in refined.pictures.info["infotexts"][0]
    assert_different(plain, refined, "the refiner")
    assert_same(run_on(webui, request), plain)


def test_images_after_switches_of_the_vae_are_the_webuis(webui: WebUI, switching: Models) -> None:
    """Another VAE changes the image, and the first one gives the first image again."""
    vae = switching.need("vae")
    option, none = ("forge_additional_modules", []) if webui.kind == "forge" else ("sd_vae", "None")
    with webui.options(**{option: none}):
        plain, _ = assert_same_on_and_off(webui, {})
        webui.set_options(**{option: [vae] if webui.kind == "forge" else vae})
        other, _ = assert_same_on_and_off(webui, {})
        assert_different(plain, other, "the VAE")
        webui.set_options(**{option: none})
        assert_same(run_on(webui, {}), plain)

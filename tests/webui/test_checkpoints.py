"""Images match those of the WebUI alone (OneDiff off; no pixel differs by more than 1 of 255), whatever checkpoint,
refiner or VAE is loaded between images or within one. A role, such as "sd15-b", names a model: see webui_models.py."""
from __future__ import annotations

import pytest
from webui_client import WebUI
from webui_compare import assert_different, assert_same, assert_same_on_and_off, need, run_off, run_on
from webui_models import Models, stem


@pytest.fixture
def switching(webui: WebUI, sd15: Models) -> Models:
    """The models, of a WebUI that can switch checkpoints."""
    need(webui, "checkpoint switch")
    return sd15


@pytest.mark.parametrize("one, other", [
    ("sd15", "sd15-b"), ("twin", "twin-b"), ("sd15", "inpaint"), ("sd15", "sdxl"), ("sd15", "sd2"),
], ids=lambda role: role)
def test_images_after_switches_of_the_checkpoint_match_those_of_the_webui(
    webui: WebUI, switching: Models, one: str, other: str
) -> None:
    """All images with OneDiff on are made first, then all with OneDiff off. Each checkpoint's second image matches its
    first. one, other: the roles of checkpoints that alternate; twin and twin-b may be loaded into the same module."""
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


def test_an_image_with_an_overridden_checkpoint_matches_the_webui_and_the_next_is_as_before(
    webui: WebUI, switching: Models
) -> None:
    """The request's override_settings name another checkpoint for this image only."""
    plain = run_on(webui, {})
    override = {"override_settings": {"sd_model_checkpoint": switching.need("sd15-b")}}
    other, _ = assert_same_on_and_off(webui, override)
    assert_different(plain, other, "the checkpoint")
    assert_same(run_on(webui, {}), plain)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("base, refiner_role", [("sd15", "sd15-b"), ("sdxl", "sdxl-b"), ("sdxl", "refiner")])
def test_images_with_a_refiner_match_the_webui_and_the_next_images_without_it_are_as_before(
    webui: WebUI, switching: Models, base: str, refiner_role: str, batches: int
) -> None:
    """The refiner takes over at half of the steps. batches: the batch count (n_iter)."""
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


def test_images_after_switches_of_the_vae_match_those_of_the_webui(webui: WebUI, switching: Models) -> None:
    """Another VAE changes the image. With the checkpoint's own VAE again, the image matches the first one."""
    vae = switching.need("vae")
    option, none = ("forge_additional_modules", []) if webui.kind == "forge" else ("sd_vae", "None")
    with webui.options(**{option: none}):
        plain, _ = assert_same_on_and_off(webui, {})
        webui.set_options(**{option: [vae] if webui.kind == "forge" else vae})
        other, _ = assert_same_on_and_off(webui, {})
        assert_different(plain, other, "the VAE")
        webui.set_options(**{option: none})
        assert_same(run_on(webui, {}), plain)

"""The product's parts of the WebUI's page, and the script, with the standalone host's modules."""
from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("gradio")
pytest.importorskip("fastapi")

import gradio

from lib_onediff.accelerator import runtime
from lib_onediff.hosts.standalone.modules.options import OptionInfo, Options
from lib_onediff.settings import Settings
from lib_onediff.shapes.warmup import WarmUp
from lib_onediff.ui import accordion, run_settings, settings_tab, status

STATUS = {
    "enabled": True, "model": "<b>SD1</b>", "backend": "eager", "resolution": "64x72", "route": "plain",
    "reason": "a & b", "step_ms": 12.345, "host_ms": 24.69, "ratio": 2.0, "relative_error": None,
    "calls": {"graph": 0, "plain": 3, "blocks": 0, "host": 0},
}


def test_status_line_says_everything_and_escapes_it() -> None:
    line = status.status_html(STATUS)
    for part in ("plain launches", "12.3 ms", "2.00x", "24.7 ms", "64x72", "&lt;b&gt;SD1&lt;/b&gt;", "a &amp; b"):
        assert part in line
    assert "<b>SD1" not in line


def test_status_line_before_the_first_picture() -> None:
    line = status.status_html(runtime.status())
    assert "None" not in line


def test_model_that_is_not_served_is_reported() -> None:
    assert status.current_status(lambda: None) == runtime.status()
    told = status.current_status(lambda: "not served yet")
    assert told["route"] == "host" and told["reason"] == "not served yet"


def test_settings_become_options() -> None:
    opts = Options({})
    settings_tab.add_options(opts, OptionInfo, lambda: None)
    assert {key: getattr(opts, key) for key in opts.data_labels} == {
        f"onediff_{option.name}": option.default for option in fields(Settings)
    }
    assert opts.onediff_backend == "auto" and opts.data_labels["onediff_memory_budget"].default == 0
    backend = opts.data_labels["onediff_backend"]
    assert backend.component is gradio.Radio and "eager" in backend.component_args["choices"]
    assert backend.section == ("onediff", "OneDiff") and "graph" in backend.comment_after
    assert opts.set("onediff_backend", "eager")
    assert runtime.settings == Settings(backend="eager")
    opts.set("onediff_backend", "warp")
    assert runtime.settings == Settings(backend="eager") and opts.onediff_backend == "eager"


def test_stored_settings_are_in_force_from_the_start() -> None:
    opts = Options({})
    opts.data.update(onediff_enabled=False)
    settings_tab.add_options(opts, OptionInfo, lambda: None)
    assert runtime.settings.enabled is False


def test_unusable_stored_settings_give_way_to_the_defaults() -> None:
    class Unchecked(Options):
        """As A1111: stored values are not compared with the choices."""

        def add_option(self, key: str, info: OptionInfo) -> None:
            self.data_labels[key] = info
            self.data.setdefault(key, info.default)

    opts = Unchecked({})
    opts.data.update(onediff_backend="gone")
    settings_tab.add_options(opts, OptionInfo, lambda: None)
    assert runtime.settings == Settings()


@pytest.mark.parametrize("argument, standing, expected", [
    (True, Settings(), Settings()),
    (False, Settings(), Settings(enabled=False)),
    (True, Settings(enabled=False), Settings(enabled=False)),
    ({"enabled": True}, Settings(enabled=False, backend="eager"), Settings(enabled=False, backend="eager")),
    ({"backend": "eager"}, Settings(memory_budget=500), Settings(backend="eager", memory_budget=500)),
    ({}, Settings(verify=False), Settings(verify=False)),
])
def test_settings_of_a_run(argument: Any, standing: Settings, expected: Settings) -> None:
    assert run_settings.settings_of_run(argument, standing) == expected


@pytest.mark.parametrize("argument", [None, "yes", 1, [], {"speed": 9}, {"enabled": "x"}, {"backend": "warp"},
                                      {"cache_folder": "/tmp"}, {"prewarm": "512x512"}, {"memory_budget": 1}])
def test_wrong_settings_of_a_run(argument: Any) -> None:
    with pytest.raises(ValueError, match="OneDiff"):
        run_settings.settings_of_run(argument, Settings())


class Generation:
    """A stand-in for StableDiffusionProcessing that notes the settings in force while it samples."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def sample(self, fail: bool = False) -> str:
        self.seen.append(runtime.status()["enabled"])
        if fail:
            raise RuntimeError("sampling failed")
        return "latents"


def test_settings_hold_while_sampling_only() -> None:
    p = Generation()
    run_settings.use_for_sampling(p, Settings(enabled=False))
    assert runtime.status()["enabled"] is True
    assert p.sample() == "latents"
    assert runtime.status()["enabled"] is True
    run_settings.restore_sampling(p)
    p.sample()
    assert p.seen == [False, True]
    assert "sample" not in p.__dict__


def test_failed_sampling_leaves_the_settings_alone() -> None:
    p = Generation()
    run_settings.use_for_sampling(p, Settings(enabled=False))
    with pytest.raises(RuntimeError, match="sampling failed"):
        p.sample(fail=True)
    assert runtime.status()["enabled"] is True
    run_settings.use_for_sampling(p, Settings())
    assert p.sample() == "latents" and p.seen == [False, True]


def test_somebody_elses_wrapper_stays() -> None:
    p = Generation()
    run_settings.use_for_sampling(p, Settings(enabled=False))
    ours = p.sample
    p.sample = lambda: ours()
    run_settings.restore_sampling(p)
    assert p.sample() == "latents" and p.seen == [False]


def test_accordion_has_no_effect_beside_its_components() -> None:
    before = runtime.status(), runtime.settings
    with gradio.Blocks():
        controls = [accordion.build_accordion("txt2img", lambda: "status") for _ in range(2)]
    assert [len(found) for found in controls] == [1, 1]
    assert controls[0][0].value is True and controls[0][0].elem_id == "onediff_txt2img_enabled"
    assert (runtime.status(), runtime.settings) == before


class NoWebUI:
    """The page only asks of it what a click would."""


def test_status_line_is_renewed_by_the_hosts_description_of_a_generation() -> None:
    with gradio.Blocks() as page:
        accordion.build_accordion("img2img", lambda: "status")
        already = len(page.get_config_file()["dependencies"])
        for elem_id, added in (("generation_info_txt2img", 0), ("generation_info_img2img", 1)):
            box = gradio.Textbox(elem_id=elem_id)
            accordion.connect(box, "img2img", lambda: "status", WarmUp(NoWebUI(), runtime))
            dependencies = page.get_config_file()["dependencies"]
            assert len(dependencies) == already + added
    assert dependencies[-1]["targets"] == [(box._id, "change")]


def test_script_serves_diffusers_models_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lib_onediff.hosts.diffusers import is_attached
    from lib_onediff.hosts.standalone.modules import paths, script_callbacks, script_loading, sd_models
    from lib_onediff.hosts.standalone.registration import modules_importable
    from lib_onediff.hosts.standalone.tiny_model import tiny_sd15_pipeline

    root = settings_tab.__file__.rsplit("/lib_onediff/", 1)[0]
    script_callbacks.clear_callbacks()
    monkeypatch.setattr(paths, "data_path", str(tmp_path))
    unet = tiny_sd15_pipeline().unet
    with modules_importable():
        script = script_loading.load_module(f"{root}/scripts/onediff.py")
        try:
            sd_models.use_model(SimpleNamespace(model="something else"))
            assert "has no UNet2DConditionModel" in script.current_status()["reason"]
            sd_models.use_model(SimpleNamespace(unet=unet))
            assert is_attached(unet)
            assert script.current_status() == {"host": "standalone", "hooks": 1, **runtime.status()}
            script_callbacks.script_unloaded_callback()
            assert not is_attached(unet)
        finally:
            sd_models.use_model(None)
            script_callbacks.clear_callbacks()


def test_a_run_switched_off_is_off_when_its_first_picture_is_encoded() -> None:
    seen: list[tuple[str, bool]] = []

    def step(name: str) -> Any:
        return lambda: seen.append((name, (runtime.run_settings or (runtime.settings,))[0].enabled))

    class Run:
        def __init__(self) -> None:
            self.__class__.init, self.__class__.sample = staticmethod(step("init")), staticmethod(step("sample"))

    p = Run()
    run_settings.use_for_sampling(p, Settings(enabled=False))
    p.init()
    p.sample()
    run_settings.restore_sampling(p)
    p.init()
    assert seen == [("init", False), ("sample", False), ("init", True)] and not p.__dict__

"""The product's parts of the WebUI's page, and the script, with the standalone host's modules."""
from __future__ import annotations

import html
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("gradio")
pytest.importorskip("fastapi")

import gradio

from lib_onediff.demo import page as page_of_host
from lib_onediff.demo import rest
from lib_onediff.demo.modules import shared
from lib_onediff.demo.modules.options import OptionInfo, Options
from lib_onediff.demo.refusal import Refusal
from lib_onediff.hosts.contract import WebUI
from lib_onediff.options.settings import OFF_IN_SETTINGS, Settings
from lib_onediff.prewarm.worker import WarmUp
from lib_onediff.runtime.runtime import runtime
from lib_onediff.ui import accordion, run_settings, settings_tab, status

# What the controls of the accordion show at first.
SHOWN = ("auto", 1, 1, "off", 1.0)
STATUS = {
    "enabled": True, "model": "<b>SD1</b>", "backend": "eager", "resolution": "64x72", "route": "plain",
    "reason": "a & b", "step_ms": 12.345, "host_ms": 24.69, "ratio": 2.0, "relative_error": None,
    "calls": {"graph": 0, "plain": 3, "blocks": 0, "host": 0},
}


def test_status_line_says_everything_and_escapes_it() -> None:
    line = status.status_html(STATUS)
    for part in ("without CUDA graphs", "2.0x faster (12.3 ms vs 24.7 ms)", "64x72", "&lt;b&gt;SD1&lt;/b&gt;",
                 "a &amp; b"):
        assert part in line
    assert "<b>SD1" not in line


def test_status_line_says_why_guidance_does_not_end() -> None:
    line = status.status_html({**STATUS, "guidance": {"without_negative": 0, "reason": "Guidance end rests: <AND>"}})
    assert "Guidance end rests: &lt;AND&gt;" in line


def test_status_line_before_the_first_picture() -> None:
    line = status.status_html(runtime.status())
    assert "None" not in line


def test_model_that_is_not_served_is_reported() -> None:
    told = status.current_status(WebUI("SomeUI 3", "not served yet"))
    assert told["route"] == "host" and told["reason"] == "not served yet" and not told["served"]
    assert (told["release"], told["hooks"], told["notes"]) == ("SomeUI 3", 0, [])
    line = status.status_html({**told, "notes": ["Sage is not used."], "faults": ["a fault <of> ours"]})
    assert "not served yet" in line and "Sage is not used." in line and "a fault &lt;of&gt; ours" in line


def test_beside_a_model_that_is_not_served_nothing_is_shown_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    last = {**runtime.status(), **STATUS, "image": {"seconds": 2.0, "host_seconds": None, "steps": {"whole": 3}}}
    last["deepcache"] = {"full": 3, "cached": 0, "reason": "DeepCache rests: few steps", "reused": ""}
    monkeypatch.setattr(runtime, "status", lambda: last)
    served, refused = (status.current_status(WebUI("UI", why)) for why in ("", "its network is a Flux"))
    for shown in (status.summary_html, status.status_html):
        assert "12.3 ms" in shown(served) and "2.0x faster" in shown(served) and "2.0 s" in shown(served)
        for gone in ("12.3 ms", "2.0x faster", "2.0 s", "SD1", "64x72", "few steps", "UNet"):
            assert gone not in shown(refused)
    assert "its network is a Flux" in status.status_html(refused)


def test_settings_become_options() -> None:
    opts = Options({})
    settings_tab.add_options(opts, OptionInfo, lambda: None)
    assert opts.data == {f"onediff_{option.name}": option.default for option in fields(Settings)}
    assert opts.onediff_backend == "auto" and opts.data_labels["onediff_memory_budget"].default == 0
    backend = opts.data_labels["onediff_backend"]
    assert backend.component is gradio.Radio and "eager" in backend.component_args["choices"]
    assert backend.section == ("onediff", "OneDiff") and "auto: the fastest" in backend.comment_after
    assert opts.set("onediff_backend", "eager")
    assert runtime.settings == Settings(backend="eager")
    opts.set("onediff_backend", "warp")
    assert runtime.settings == Settings(backend="eager") and opts.onediff_backend == "eager"


def test_what_is_only_shown_cannot_be_set_by_the_page_or_the_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "opts", Options({}))
    runtime.history.open(tmp_path)
    settings_tab.add_options(shared.opts, OptionInfo, lambda: None)
    with gradio.Blocks() as page:
        page_of_host.build_settings_tab(page)
    found = {getattr(block, "elem_id", None): block for block in page.blocks.values()}
    shown = found["setting_onediff_folder_in_use"]
    assert shown.value == str(tmp_path) and not shown.interactive and "ONEDIFF_CACHE" in shown.info
    assert found["setting_onediff_prewarm"].interactive is not False
    config = page.get_config_file()
    used = [dependency["inputs"] for dependency in config["dependencies"] if dependency["inputs"]]
    assert used and not any(shown._id in inputs for inputs in used)
    assert "onediff_folder_in_use" not in rest.get_options()
    with pytest.raises(Refusal, match="did not accept"):
        rest.set_options({"onediff_folder_in_use": "/etc"})
    assert shared.opts.onediff_folder_in_use == str(tmp_path)


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


def both_statuses() -> tuple[str, str]:
    return "title", "status"


def build_accordion(tab: str) -> list[Any]:
    return accordion.build_accordion(
        tab, both_statuses, lambda *values: run_settings.settings_of_run(values, Settings()),
    )


def test_accordion_has_no_effect_beside_its_components() -> None:
    before = runtime.status(), runtime.settings
    with gradio.Blocks():
        controls = [build_accordion("txt2img") for _ in range(2)]
    for found in controls:
        assert tuple(component.value for component in found) == run_settings.AS_AT_FIRST
        assert [component.elem_id for component in found] == [
            "onediff_txt2img_enabled", "onediff_txt2img_preset", "onediff_txt2img_changes",
        ]
    assert (runtime.status(), runtime.settings) == before


@pytest.mark.parametrize(("values", "said"), [
    ((True, "As in the settings", ""), "This run: on."), ((False, "As in the settings", ""), "This run: off."),
    ((True, "Balanced", "vae_precision fp16"),
     "This run: on; deepcache_interval 3; deepcache_depth 3; vae_precision fp16."),
    ((True, "Gone", ""), "no preset"), ((True, "Balanced", "speed 9"), "the image is made without OneDiff"),
])
def test_accordion_says_what_the_run_will_be(values: tuple[Any, ...], said: str) -> None:
    with gradio.Blocks() as page:
        build_accordion("img2img")
    tells = [function.fn for function in page.fns.values() if function.fn and function.fn.__name__ == "tell"]
    told, *_ = tells[0](*values, *SHOWN)
    assert said in told
    assert ("onediff-wrong" in told) == ("This run:" not in told)


def test_the_accordion_says_where_onediff_is_switched_off() -> None:
    """Its checkbox is of the run, and stays as it was."""
    runtime.configure(Settings(enabled=False))
    with gradio.Blocks() as page:
        build_accordion("img2img")
    tells = {function.fn for function in page.fns.values() if function.fn and function.fn.__name__ == "tell"}
    for tell in tells:
        said, *_ = tell(True, "As in the settings", "", *SHOWN)
        assert f"{html.escape(OFF_IN_SETTINGS)}." in said
    told = status.current_status(WebUI("SomeUI 3", ""))
    assert (told["route"], told["reason"], told["enabled"]) == ("host", f"{OFF_IN_SETTINGS}.", False)
    runtime.configure(Settings())
    assert status.current_status(WebUI("SomeUI 3", "not served yet"))["reason"] == "not served yet"


def test_prewarming_while_onediff_is_switched_off_is_refused_with_the_reason() -> None:
    runtime.configure(Settings(enabled=False))
    warmup = WarmUp(NoWebUI(), runtime)
    with gradio.Blocks() as page:
        build_accordion("txt2img")
        for name in ("width", "height", "batch_size"):
            gradio.Number(elem_id=f"txt2img_{name}")
        accordion.connect(gradio.Textbox(elem_id="generation_info_txt2img"), "txt2img", both_statuses, warmup)
    begin = next(function.fn for function in page.fns.values() if function.fn and function.fn.__name__ == "begin")
    assert f"{html.escape(OFF_IN_SETTINGS)}, so nothing can be made ready." in begin(512, 512, 1)[1]


class NoWebUI:
    """The page only asks of it what a click would."""


def test_status_line_is_renewed_by_the_hosts_description_of_a_generation() -> None:
    with gradio.Blocks() as page:
        build_accordion("img2img")
        already = len(page.get_config_file()["dependencies"])
        for elem_id, added in (("generation_info_txt2img", 0), ("generation_info_img2img", 3)):
            box = gradio.Textbox(elem_id=elem_id)
            accordion.connect(box, "img2img", both_statuses, WarmUp(NoWebUI(), runtime))
            dependencies = page.get_config_file()["dependencies"]
            assert len(dependencies) == already + added
    # The status, and what the run will be by the settings as they are now.
    assert [dependency["targets"] for dependency in dependencies[-2:]] == [[(box._id, "change")]] * 2


def test_script_serves_diffusers_models_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lib_onediff.demo.modules import modules_importable, paths, script_callbacks, scripts, sd_models
    from lib_onediff.demo.tiny_model import tiny_sd15_pipeline
    from lib_onediff.hosts.diffusers.instance_forward import attached

    root = settings_tab.__file__.rsplit("/lib_onediff/", 1)[0]
    script_callbacks.clear_callbacks()
    monkeypatch.setattr(paths, "data_path", str(tmp_path))
    unet = tiny_sd15_pipeline().unet
    with modules_importable():
        script = scripts.load_module(f"{root}/scripts/onediff.py")
        try:
            sd_models.use_model(SimpleNamespace(model="something else"))
            assert "this checkpoint's network is a" in script.current_status()["reason"]
            sd_models.use_model(SimpleNamespace(unet=unet))
            assert attached(unet) is not None
            assert script.current_status() == {
                "host": "standalone", "release": "OneDiff's own WebUI", "hooks": 1, "notes": [], "served": True,
                **runtime.status(),
            }
            script_callbacks.call_all("script_unloaded")
            assert attached(unet) is None
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

"""scripts/onediff.py in the demo's WebUI: its callbacks, also if they raise, its script arguments, and what it writes
to the infotext."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("gradio")
pytest.importorskip("diffusers")

from builders import a_call, diffusers_unet, relative_error, served
from test_hook_faults import broken
from torch import Tensor
from vae_builders import diffusers_vae

from lib_onediff.core.settings import DEEPCACHE_OPTIONS, TRANSFORMER_OPTIONS
from lib_onediff.demo.modules import modules_importable, paths, script_callbacks, scripts, sd_models, shared
from lib_onediff.hosts.diffusers.module_forward import attached
from lib_onediff.runtime.runtime import runtime
from lib_onediff.runtime.vae.route import OURS

SCRIPT = Path(__file__).parents[2] / "scripts" / "onediff.py"


class Generation:
    """The part of the WebUI's processing object that our script uses."""

    def __init__(self) -> None:
        self.extra_generation_params: dict[str, Any] = {}
        self.is_hr_pass = False
        self.comments: list[str] = []

    def comment(self, text: str) -> None:
        self.comments.append(text)


class Standalone:
    """The demo's WebUI with our script and a small model."""

    def __init__(self) -> None:
        self.unet = diffusers_unet()
        self.vae = diffusers_vae()
        self.model = SimpleNamespace(unet=self.unet, pipeline=SimpleNamespace(unet=self.unet, vae=self.vae))
        self.script = scripts.load_module(str(SCRIPT))
        self.page: Any = self.script.OneDiffScript()
        self.page.is_img2img = False
        self.callback("ui_settings")
        sd_models.model_data.sd_model = shared.sd_model = self.model
        self.callback("model_loaded", self.model)

    def callback(self, name: str, *arguments: Any) -> Any:
        """Call our function for one of the WebUI's callbacks. Raises its exceptions, which a WebUI would catch."""
        (registered,) = script_callbacks.callback_map[name]
        return registered(*arguments)

    def generate(self) -> Tensor:
        """Make one generation of one UNet call, and return the UNet's output."""
        p = Generation()
        self.page.process(p, True)
        self.page.process_before_every_sampling(p)
        output = served(self.unet, a_call(self.unet))
        self.page.postprocess(p, SimpleNamespace())
        assert p.comments == []
        return output

    def switch(self, on: bool) -> None:
        """Switch OneDiff on or off as the settings tab does. Raises exceptions of the option's onchange."""
        shared.opts.data["onediff_enabled"] = on
        shared.opts.data_labels["onediff_enabled"].onchange()


@pytest.fixture
def standalone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Standalone]:
    script_callbacks.callback_map.clear()
    monkeypatch.setattr(paths, "data_path", str(tmp_path))
    for name in ("data", "data_labels"):
        monkeypatch.setitem(vars(shared.opts), name, dict(vars(shared.opts)[name]))
    with modules_importable():
        host = Standalone()
        yield host
        host.script.stop()
        sd_models.use_model(None)
        script_callbacks.callback_map.clear()


@pytest.mark.parametrize(("where", "hook"), [
    (lambda host: (host.script.runtime.generations, "begin"), "the settings of this generation"),
    (lambda host: (host.script.webui, "before_sampling"), "the beginning of a sampling"),
    (lambda host: (runtime, "keep_history"), "the end of a generation"),
], ids=["process", "process_before_every_sampling", "postprocess"])
def test_a_fault_in_a_callback_does_not_change_the_image(
    where: Any, hook: str, standalone: Standalone, tracebacks: Any
) -> None:
    """where: returns the object whose function is made to raise, and that function's name. hook: the callback's name in
    the recorded sentence. After a fault before the sampling, the WebUI's own forward computes the image; a fault at the
    end of a generation comes after OneDiff's forward. OneDiff serves the next generation."""
    standalone.switch(False)
    expected = standalone.generate()
    standalone.switch(True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*where(standalone), broken)
        output = standalone.generate()
    sentence = f"a fault of OneDiff in {hook}, please report it: broken by a test"
    assert runtime.guard.faults == [sentence] and tracebacks() == 1
    if hook == "the end of a generation":
        assert runtime.status()["route"] == "plain" and relative_error(output, expected) < 1e-5
    else:
        assert (runtime.status()["route"], runtime.status()["reason"]) == ("host", sentence)
        assert torch.equal(output, expected)
    output = standalone.generate()
    assert runtime.status()["route"] == "plain" and relative_error(output, expected) < 1e-5 and tracebacks() == 1


@pytest.mark.parametrize(("on", "arguments", "problem", "infotext"), [
    (True, ("yes",), "OneDiff's script argument is true, false or a mapping of its options, not 'yes'.", "off"),
    (False, ({"enabled": True},), "switched off in the settings", None), (False, (False, "Fastest"), "", None),
    (True, ({"low_bit": "auto", "enabled": False},), "", "off; low_bit auto"),
    (True, ({"low_bit": "int8"},), "", "on"),
], ids=str)
def test_the_infotext_says_why_script_arguments_have_no_effect(
    on: bool, arguments: tuple[Any, ...], problem: str, infotext: str | None, standalone: Standalone,
) -> None:
    """Clients of the API send script arguments and get the infotext. on: whether OneDiff is on in the settings.
    problem: a part of the infotext's entry "OneDiff problem". infotext: its entry "OneDiff". If OneDiff is off against
    the request, the page shows the problem as a comment, too."""
    standalone.switch(on)
    p = Generation()
    standalone.page.process(p, *arguments)
    standalone.page.postprocess(p, SimpleNamespace())
    found = p.extra_generation_params.get("OneDiff problem", "")
    assert problem in found and bool(found) == bool(problem) and p.extra_generation_params.get("OneDiff") == infotext
    assert p.comments == [found] * bool(found and infotext in ("off", None)) and runtime.guard.faults == []


@pytest.mark.parametrize(("wanted", "while_made", "infotext"), [
    ({"backend": "eager", "deepcache_depth": 2}, "on; deepcache_depth 2; backend eager", "on; backend eager"),
    ({"backend": "native", "deepcache_interval": 3, "skip_negative_after": 50, "low_bit_budget": 0.05},
     "on; deepcache_interval 3; backend native; low_bit_budget 0.05; skip_negative_after 50", "on"),
    ({"enabled": False}, "off", "off"),
], ids=str)
def test_the_infotext_leaves_out_options_that_had_no_effect(
    wanted: Any, while_made: str, infotext: str, standalone: Standalone
) -> None:
    """wanted: the script argument. The image has one step, so that DeepCache has no step to skip, and is made on a CPU,
    where no weight is stored in 8 bits. while_made: the infotext of a preview, before it is known which options have an
    effect."""
    p = Generation()
    standalone.page.process(p, wanted)
    assert p.extra_generation_params["OneDiff"] == while_made
    standalone.page.process_before_every_sampling(p)
    served(standalone.unet, a_call(standalone.unet))
    standalone.page.postprocess_batch(p, images=[])
    assert p.extra_generation_params["OneDiff"] == infotext
    standalone.page.postprocess(p, SimpleNamespace())


@pytest.mark.parametrize(("wanted", "without_network", "with_vae"), [
    ({}, "not accelerated", "only the VAE accelerated"), ({"enabled": False}, "off", "off"),
], ids=str)
def test_the_infotext_says_if_the_network_is_not_accelerated(
    wanted: Any, without_network: str, with_vae: str, standalone: Standalone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wanted: the script argument. without_network: the infotext if OneDiff serves neither the UNet or transformer nor
    the VAE. with_vae: the infotext if it has decoded the image."""
    p = Generation()
    standalone.page.process(p, wanted)
    standalone.page.process_before_every_sampling(p)
    monkeypatch.setattr(standalone.script.webui, "why_not_served", lambda: "Anima is not accelerated")
    standalone.page.postprocess_batch(p, images=[])
    assert p.extra_generation_params["OneDiff"] == without_network
    runtime.generations.innermost.log.vae = OURS, ""
    standalone.page.postprocess_batch(p, images=[])
    assert p.extra_generation_params["OneDiff"] == with_vae
    standalone.page.postprocess(p, SimpleNamespace())


@pytest.mark.parametrize(("used", "infotext"), [
    (DEEPCACHE_OPTIONS, "on; deepcache_interval 3"), (TRANSFORMER_OPTIONS, "on; transformer_interval 2"),
    (frozenset(), "on"),
], ids=["UNet", "transformer", "too few steps"])
def test_of_options_for_unets_and_for_transformers_the_infotext_names_those_that_were_used(
    used: frozenset[str], infotext: str, standalone: Standalone
) -> None:
    """The request sets an option of each kind. used: the options that had an effect, as the generation's log has
    them."""
    p = Generation()
    standalone.page.process(p, {"deepcache_interval": 3, "transformer_interval": 2})
    standalone.page.process_before_every_sampling(p)
    served(standalone.unet, a_call(standalone.unet))
    runtime.generations.innermost.log.cache_options.update(used)
    standalone.page.postprocess_batch(p, images=[])
    assert p.extra_generation_params["OneDiff"] == infotext
    standalone.page.postprocess(p, SimpleNamespace())


@pytest.mark.parametrize("variable", [None, "~/elsewhere", " "])
def test_only_the_environment_variable_sets_the_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, variable: str | None
) -> None:
    """variable: ONEDIFF_CACHE; None: not set. If it is not set or blank, the folder is cache/onediff in the WebUI's
    data folder. The setting of earlier versions, still stored in config.json, has no effect."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ONEDIFF_CACHE", raising=False)
    if variable is not None:
        monkeypatch.setenv("ONEDIFF_CACHE", variable)
    # An earlier version had a setting for it, which may still be in config.json.
    monkeypatch.setitem(shared.opts.data, "onediff_cache_folder", str(tmp_path / "stored"))
    standalone = request.getfixturevalue("standalone")
    folder = tmp_path / ("elsewhere" if variable and variable.strip() else "cache/onediff")
    assert runtime.history.folder == folder
    assert list(folder.glob("*.sqlite3")) and not (tmp_path / "stored").exists()
    assert standalone.generate().shape


@pytest.mark.parametrize("where", [
    lambda host: (host.script.jobs, "stop"), lambda host: (runtime, "release_all"),
    lambda host: (host.script.xyz, "remove_axes"),
], ids=["jobs.stop", "release_all", "remove_axes"])
def test_a_fault_while_the_script_is_unloaded_leaves_no_hook(where: Any, standalone: Standalone) -> None:
    """where: returns the object whose function is made to raise, and that function's name."""
    standalone.generate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*where(standalone), broken)
        standalone.callback("script_unloaded")
    assert standalone.script.webui.hooks() == 0 and len(runtime.guard.faults) == 1
    assert "forward" not in standalone.unet.__dict__ and attached(standalone.vae.decoder) is None

"""The standalone host's parts, in this process."""
from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("PIL")

from diffusers import DDIMScheduler
from tiny_sdxl import tiny_sdxl_pipeline

from lib_onediff.demo import errors, images, listening, offline, rest
from lib_onediff.demo.loaded_model import LoadedModel
from lib_onediff.demo.modules import (
    call_queue,
    devices,
    infotext_utils,
    modules_importable,
    options,
    processing,
    script_callbacks,
    sd_samplers,
    shared,
)
from lib_onediff.demo.modules.scripts import ScriptRunner
from lib_onediff.demo.refusal import Refusal
from lib_onediff.demo.tiny_model import tiny_sd15_pipeline

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return LoadedModel(tiny_sd15_pipeline(), "small")


@pytest.fixture
def callbacks() -> Iterator[None]:
    """Start and end without registered functions."""
    script_callbacks.clear_callbacks()
    yield
    script_callbacks.clear_callbacks()


def generate(model: LoadedModel, kind: type = processing.StableDiffusionProcessingTxt2Img, **changes: Any) -> Any:
    settings = {"prompt": "a fox", "seed": 3, "steps": 3, "width": 64, "height": 72, "sampler_name": "Euler a"}
    p = kind(**{**settings, **changes})
    p.sd_model, p.script_args = model, ()
    shared.state.begin("test")
    try:
        return processing.process_images(p)
    finally:
        shared.state.end()


# --- pictures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [tiny_sd15_pipeline, tiny_sdxl_pipeline])
@pytest.mark.parametrize("sampler", ["Euler a", "DDIM"])
def test_picture_is_the_pipelines_own(build: Any, sampler: str) -> None:
    """The host adds nothing to what diffusers makes of the same prompt, seed and scheduler."""
    pipeline = build()
    made = generate(LoadedModel(pipeline, "small"), negative_prompt="rain", sampler_name=sampler).images[0]
    pipeline.scheduler = sd_samplers.make_scheduler(sampler, "Automatic", dict(build().scheduler.config), [3])
    expected = pipeline(
        "a fox", negative_prompt="rain", width=64, height=72, num_inference_steps=3, guidance_scale=7.0,
        generator=torch.Generator().manual_seed(3),
    ).images[0]
    difference = numpy.asarray(made, dtype=int) - numpy.asarray(expected, dtype=int)
    assert numpy.abs(difference).max() <= 1


@pytest.mark.parametrize("name", [sampler.name for sampler in sd_samplers.available()])
def test_every_sampler_makes_a_repeatable_picture(model: LoadedModel, name: str) -> None:
    first, again = (generate(model, sampler_name=name, batch_size=2).images for _ in range(2))
    assert [image.tobytes() for image in first] == [image.tobytes() for image in again]
    assert first[0].tobytes() != first[1].tobytes()
    assert numpy.asarray(first[0]).std() > 10


def test_schedules_differ(model: LoadedModel) -> None:
    pictures = {
        schedule: generate(model, sampler_name="Euler", scheduler=schedule).images[0].tobytes()
        for schedule in sd_samplers.SCHEDULES
    }
    assert pictures["Uniform"] != pictures["Karras"]
    assert pictures["Automatic"] == pictures["Uniform"]


def test_old_sampler_names_mean_karras() -> None:
    sampler, schedule = sd_samplers.find("DPM++ 2M Karras", None)
    assert (sampler.name, schedule) == ("DPM++ 2M", "Karras")


def test_schedulers_keep_the_models_prediction_type() -> None:
    config = dict(DDIMScheduler(prediction_type="v_prediction", beta_start=0.00085).config)
    for sampler in sd_samplers.available():
        scheduler = sd_samplers.make_scheduler(sampler.name, "Automatic", config, [1])
        assert scheduler.config.prediction_type == "v_prediction"
        assert scheduler.config.beta_start == config["beta_start"]


def test_interrupt_stops_after_the_step(model: LoadedModel) -> None:
    steps = []

    class Runner(ScriptRunner):
        def process_before_every_sampling(self, p: Any, **kwargs: Any) -> None:
            shared.state.interrupt()
            steps.append(kwargs["x"].shape)

    p = processing.StableDiffusionProcessingTxt2Img(prompt="a", seed=1, steps=50, width=64, height=64, n_iter=3)
    p.sd_model, p.scripts, p.script_args = model, Runner(), (0,)
    shared.state.begin("test")
    processed = processing.process_images(p)
    assert shared.state.sampling_step in (0, 1)
    shared.state.end()
    assert len(processed.images) == 1 and steps == [(1, 4, 8, 8)]


def test_nan_is_told_apart(model: LoadedModel) -> None:
    devices.test_for_nans(torch.zeros(2), "unet")
    for value in (float("nan"), float("inf")):
        with pytest.raises(devices.NansException, match="VAE"):
            devices.test_for_nans(torch.tensor([0.0, value]), "vae")


def test_transparent_images_get_a_white_ground() -> None:
    from PIL import Image

    assert images.flatten(Image.new("RGBA", (2, 2), (255, 0, 0, 0))).getpixel((0, 0)) == (255, 255, 255)


def test_models_refuse_what_they_cannot_do() -> None:
    inpainting = LoadedModel(tiny_sd15_pipeline(in_channels=9), "paint")
    with pytest.raises(Refusal, match="inpainting model"):
        inpainting.text_to_image()
    with pytest.raises(Refusal, match="needs a mask"):
        inpainting.image_to_image()
    refiner = LoadedModel(SimpleNamespace(unet=tiny_sdxl_pipeline().unet, text_encoder=None), "refine")
    with pytest.raises(Refusal, match="refiner"):
        refiner.text_to_image()


# --- the modules API -----------------------------------------------------------------------------------------------


def test_modules_are_importable_only_inside() -> None:
    with modules_importable():
        import modules.shared
        from modules import scripts

        assert modules.shared is shared
        assert scripts.Script is not None
        with pytest.raises(RuntimeError), modules_importable():
            pass
    assert not [name for name in sys.modules if name.split(".")[0] == "modules"]


def test_callbacks_swallow_what_scripts_raise(callbacks: None, capsys: pytest.CaptureFixture[str]) -> None:
    called = []
    script_callbacks.on_model_loaded(lambda model: 1 / 0)
    script_callbacks.on_model_loaded(called.append)
    script_callbacks.call_all("model_loaded", "the model")
    assert called == ["the model"]
    told = capsys.readouterr().err
    assert "division by zero" in told and __file__ in told and "Traceback" not in told


def test_hooks_swallow_what_scripts_raise_and_get_their_arguments() -> None:
    seen = []

    class Broken:
        filename, args_from, args_to = "broken.py", 1, 2

        def process(self, p: Any, *args: Any) -> None:
            raise ValueError("broken on purpose")

    class Works(Broken):
        args_from, args_to = 2, 4

        def process(self, p: Any, *args: Any) -> None:
            seen.append(args)

    runner = ScriptRunner()
    runner.alwayson_scripts = [Broken(), Works()]
    runner.process(SimpleNamespace(script_args=(0, "a", "b", "c")))
    assert seen == [("b", "c")]


def test_queue_is_first_come_first_served() -> None:
    lock, order = call_queue.FIFOLock(), []

    def work(number: int) -> None:
        with lock:
            order.append(number)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    with lock:
        assert lock.acquire(blocking=False) is False
        for worker in workers:
            worker.start()
            time.sleep(0.05)
    for worker in workers:
        worker.join(5)
    assert order == [0, 1, 2, 3, 4]


def make_options() -> options.Options:
    return options.Options({
        "kind": options.OptionInfo("a", "Kind", None, {"choices": ["a", "b"]}, section=("x", "X")),
        "on": options.OptionInfo(True, "On", section=("x", "X")),
        "share": options.OptionInfo(0.5, "Share", section=("x", "X")),
    })


def test_options_survive_a_restart(tmp_path: Path) -> None:
    opts, file = make_options(), str(tmp_path / "new" / "config.json")
    assert opts.set("kind", "b") and not opts.set("kind", "b")
    opts.save(file)
    again = make_options()
    again.load(file)
    assert (again.kind, again.on, again.share) == ("b", True, 0.5)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff\xfe"])
def test_damaged_options_are_set_aside(tmp_path: Path, content: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content.encode("latin-1"))
    opts = make_options()
    opts.load(str(file))
    assert opts.kind == "a"
    assert not file.exists() and file.with_suffix(".damaged").exists()


def test_eight_clients_may_set_options_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opts, file = make_options(), tmp_path / "config.json"
    monkeypatch.setattr(shared, "opts", opts)
    monkeypatch.setattr(shared, "config_filename", str(file))

    def work(number: int) -> None:
        for turn in range(50):
            rest.set_options({"share": float(number), "kind": "ab"[turn % 2]})
            json.loads(file.read_text(encoding="utf-8"))

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(8))) == [None] * 8
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_options_that_cannot_be_saved_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(shared, "opts", make_options())
    monkeypatch.setattr(shared, "config_filename", str(tmp_path / "file" / "config.json"))
    with pytest.raises(Refusal, match="could not be saved"):
        rest.set_options({"kind": "b"})


@pytest.mark.parametrize("restore", [True, False])
def test_what_a_generation_overrides_is_never_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restore: bool
) -> None:
    opts, file = make_options(), tmp_path / "config.json"
    monkeypatch.setattr(shared, "opts", opts)
    p = processing.StableDiffusionProcessing(
        override_settings={"kind": "b", "nothing": 1}, override_settings_restore_afterwards=restore
    )
    with processing.overridden_options(p):
        assert (opts.kind, opts.share) == ("b", 0.5)
        opts.set("share", 0.25)
        opts.save(str(file))
        assert json.loads(file.read_text(encoding="utf-8"))["kind"] == "a"
    assert (opts.kind, opts.share) == ("a" if restore else "b", 0.25)
    opts.save(str(file))
    assert json.loads(file.read_text(encoding="utf-8")) == {"kind": "a", "on": True, "share": 0.25}
    opts.set("kind", "a")
    assert opts.kind == "a"


def test_console_lines_of_ours_are_what_they_look_like(capsys: pytest.CaptureFixture[str]) -> None:
    errors.report("The model a\x1b[31m.ckpt\rfailed")
    assert capsys.readouterr().err == "*** The model a?[31m.ckpt\n*** failed\n"


def test_saved_values_that_do_not_fit_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"kind": "z", "on": 3, "share": 1, "later": "wrong"}))
    opts = make_options()
    opts.load(str(file))
    assert (opts.kind, opts.on, opts.share) == ("a", True, 1)
    opts.add_option("later", options.OptionInfo(7, "Later", section=("x", "X")))
    assert opts.later == 7


@pytest.mark.parametrize("value", ["\ud800", float("nan"), [float("inf")]], ids=ascii)
def test_values_that_no_file_can_hold_do_not_fit(value: Any) -> None:
    assert "JSON" in options.OptionInfo(type(value)(), "Name").problem(value)


def test_refused_change_is_undone() -> None:
    opts = make_options()
    opts.data_labels["on"].onchange = lambda: 1 / 0
    assert opts.set("on", False) is False
    assert opts.on is True


@pytest.mark.parametrize("prompt", ["a fox", "a fox, red\nin two lines", ""])
def test_infotext_reads_back(callbacks: None, prompt: str) -> None:
    text = f'{prompt}\nNegative prompt: rain\nSteps: 3, Sampler: Euler a, Size: 64x72, Note: "a, b: c"'.strip()
    parsed = infotext_utils.parse_generation_parameters(text)
    assert parsed["Prompt"] == prompt
    assert parsed["Negative prompt"] == "rain"
    assert (parsed["Size-1"], parsed["Size-2"], parsed["Note"]) == ("64", "72", "a, b: c")
    assert infotext_utils.quote("a, b: c") == '"a, b: c"'


# --- the server ----------------------------------------------------------------------------------------------------


def test_first_free_port_is_taken() -> None:
    with listening.listen("127.0.0.1", None) as first, listening.listen("127.0.0.1", None) as second:
        ports = [listener.getsockname()[1] for listener in (first, second)]
        assert listening.FIRST_PORT <= ports[0] < ports[1]
        assert listening.url_of(first) == f"http://127.0.0.1:{ports[0]}"
        assert listening.is_loopback(first)
        refusal = listening.listen("127.0.0.1", ports[0])
        assert isinstance(refusal, str) and str(ports[0]) in refusal


def test_open_address_is_shown_as_one_to_click() -> None:
    with listening.listen("0.0.0.0", 0) as listener:
        assert listening.url_of(listener).startswith("http://127.0.0.1:")
        assert not listening.is_loopback(listener)


def test_page_loses_references_to_other_hosts() -> None:
    page = (
        b'<meta property="og:url" content="https://elsewhere.example/" /><link rel="preconnect" '
        b'href="https://fonts.example"\n/><script src="https://cdn.example/x.js" async></script>'
        b'<script src="./own.js"></script><p>https://text.example</p>'
    )

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
        await send({"type": "http.response.body", "body": page[:50], "more_body": True})
        await send({"type": "http.response.body", "body": page[50:]})

    sent: list[Any] = []

    async def collect(message: Any) -> None:
        sent.append(message)

    asyncio.run(offline.OwnResourcesOnly(app)({"type": "http", "path": "/"}, None, collect))
    headers, body = dict(sent[0]["headers"]), sent[1]["body"]
    assert body == b'<script src="./own.js"></script><p>https://text.example</p>'
    assert headers[b"content-length"] == str(len(body)).encode()
    assert b"default-src 'self'" in headers[b"content-security-policy"]


def test_the_command_line_is_read_before_torch_is_imported() -> None:
    """A wrong argument and a port in use are told at once, and Ctrl-C finds its handler."""
    code = (
        "import sys, lib_onediff.demo.__main__, lib_onediff.demo.listening; assert 'torch' not in sys.modules;"
        "import lib_onediff; assert not set(lib_onediff.__all__) - set(dir(lib_onediff))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

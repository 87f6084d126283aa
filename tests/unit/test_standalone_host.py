"""The demo's modules, called within this process: images, infotext, options and the command line."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("PIL")

from tiny_model import tiny_sd15_pipeline, tiny_sdxl_pipeline

from lib_onediff.core.refusal import Refusal
from lib_onediff.demo import __main__ as demo
from lib_onediff.demo import command_line, page
from lib_onediff.demo.models import LoadedModel
from lib_onediff.demo.modules import call_queue, processing, shared
from lib_onediff.demo.modules.scripts import ScriptRunner

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return LoadedModel(tiny_sd15_pipeline(), "small")


def generate(model: LoadedModel, **changes: Any) -> Any:
    settings = {"prompt": "a fox", "seed": 3, "steps": 3, "width": 64, "height": 72, "sampler_name": "Euler a"}
    p = processing.StableDiffusionProcessingTxt2Img(**{**settings, **changes})
    p.sd_model = model
    p.script_args = ()
    shared.state.begin("test")
    try:
        return processing.process_images(p)
    finally:
        shared.state.end()


# --- images --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [tiny_sd15_pipeline, tiny_sdxl_pipeline])
@pytest.mark.parametrize("sampler", ["Euler a", "DDIM"])
def test_the_image_of_the_demo_equals_that_of_diffusers_pipeline(build: Any, sampler: str) -> None:
    """Both have the same prompt, seed and scheduler. A colour value may differ by one level of 256."""
    pipeline = build()
    made = generate(LoadedModel(pipeline, "small"), negative_prompt="rain", sampler_name=sampler).images[0]
    pipeline.scheduler = processing.make_scheduler(sampler, build().scheduler, [3])
    expected = pipeline(
        "a fox", negative_prompt="rain", width=64, height=72, num_inference_steps=3, guidance_scale=7.0,
        generator=torch.Generator().manual_seed(3),
    ).images[0]
    difference = numpy.asarray(made, dtype=int) - numpy.asarray(expected, dtype=int)
    assert numpy.abs(difference).max() <= 1


@pytest.mark.parametrize("name", processing.SAMPLERS)
def test_every_sampler_makes_the_same_image_from_the_same_seed(model: LoadedModel, name: str) -> None:
    """Both runs are equal to the bit. The two images of a batch differ from each other, and are not of one colour."""
    first, again = (generate(model, sampler_name=name, batch_size=2).images for _ in range(2))
    assert [image.tobytes() for image in first] == [image.tobytes() for image in again]
    assert first[0].tobytes() != first[1].tobytes()
    assert numpy.asarray(first[0]).std() > 10


def test_the_result_of_a_truncated_prompt_has_a_comment_about_it(model: LoadedModel) -> None:
    assert generate(model, prompt="a" * 75).comments == ""
    assert "longer than 75 tokens" in generate(model, prompt="a" * 76).comments


@pytest.mark.parametrize("changes, said", [
    ({"width": 65}, "width is 65; it must be a multiple of 8."), ({"negative_prompt": "a" * 2001}, "2000 characters"),
])
def test_an_invalid_parameter_is_refused_with_a_sentence(
    model: LoadedModel, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(Refusal, match=said):
        generate(model, **changes)


def test_an_error_while_an_image_is_made_becomes_a_sentence_and_leaves_nothing_locked(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence is that of the Refusal. Afterwards no job runs, and the queue's lock is free."""
    monkeypatch.setattr(shared, "sd_model", model)
    for error, said in ((torch.cuda.OutOfMemoryError(), "not enough memory"), (KeyError("x"), "KeyError: 'x'")):
        p = processing.StableDiffusionProcessingTxt2Img(width=64, height=64)
        monkeypatch.setattr(p, "sample", lambda error=error: (_ for _ in ()).throw(error))
        with pytest.raises(Refusal, match=said):
            page.make_images(p, ScriptRunner(), [0])
    assert shared.state.job == "" and not call_queue.queue_lock.locked()


def test_numbers_that_are_not_finite_are_refused_with_the_name_of_their_network() -> None:
    with pytest.raises(Refusal, match="VAE produced numbers that are not finite"):
        processing.check_numbers("VAE", torch.tensor([0.0, float("inf")]))


# --- infotext -------------------------------------------------------------------------------------------------------


INFOTEXT = (
    'an owl, <lora:x:1>\nsecond line\nNegative prompt: rain, "fog"\nSteps: 20, Sampler: Euler a, CFG scale: 7.5, '
    'Seed: 3, Size: 512x768, Model: a model, Lora hashes: "x: 1a, y: 2b", Said: "a \\"b\\", c: d", Version: v1.10.1'
)


def test_an_infotext_is_read_into_its_fields() -> None:
    """The values contain quotes, commas, line breaks and colons. A text without parameters is read as a prompt."""
    found = processing.parse_generation_parameters(INFOTEXT)
    assert found == {
        "Prompt": "an owl, <lora:x:1>\nsecond line", "Negative prompt": 'rain, "fog"', "Steps": "20",
        "Sampler": "Euler a", "CFG scale": "7.5", "Seed": "3", "Size-1": "512", "Size-2": "768", "Model": "a model",
        "Lora hashes": "x: 1a, y: 2b", "Said": 'a "b", c: d', "Version": "v1.10.1",
    }
    assert processing.parse_generation_parameters("an owl: a, b") == {"Prompt": "an owl: a, b", "Negative prompt": ""}
    assert processing.parse_generation_parameters("") == {"Prompt": "", "Negative prompt": ""}


@pytest.mark.parametrize("piece", ["a", "a ", '"', '\\"', '"\\', ",", "a:", "a: ", '"a', "a-/ ", ":", "é ", "[", "a,a"])
def test_reading_the_longest_infotext_is_fast(piece: str) -> None:
    """Regular expressions may take quadratic time for such texts. piece: is repeated up to the largest accepted
    length."""
    text = (piece * processing.LONGEST_INFOTEXT)[: processing.LONGEST_INFOTEXT]
    for given in (text, f'Steps: 1, a: 2, b: 3, c: "{text[:-40]}'):
        began = time.process_time()
        processing.parse_generation_parameters(given)
        assert time.process_time() - began < 1


def test_a_text_that_is_too_long_for_infotext_is_refused() -> None:
    with pytest.raises(Refusal, match="20000 characters at most"):
        processing.parse_generation_parameters("a" * 20_001)


# --- the modules API -----------------------------------------------------------------------------------------------


def make_options(file: Path) -> shared.Options:
    """Options with the values of a file, if it exists. The onchange function of `kind` resets the invalid value z."""
    opts = shared.Options()
    opts.load(str(file))

    def check() -> None:
        opts.data["kind"] = "a" if opts.data["kind"] == "z" else opts.data["kind"]

    for key, default in (("kind", "a"), ("on", True)):
        opts.add_option(key, shared.OptionInfo(default, key.title(), None, {}, ("one", "One"), check))
    return opts


@pytest.mark.parametrize("content", ["", "[1]", "\xff\xfe"])
def test_a_damaged_settings_file_is_renamed_and_the_options_have_their_defaults(tmp_path: Path, content: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content.encode("latin-1"))
    opts = make_options(file)
    assert (opts.kind, opts.on) == ("a", True)
    assert not file.exists() and file.with_suffix(".damaged").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no such files")
def test_a_named_pipe_in_place_of_the_settings_file_is_not_opened(tmp_path: Path) -> None:
    """Opening it would wait forever for a program that writes into it."""
    os.mkfifo(tmp_path / "config.json")
    assert make_options(tmp_path / "config.json").kind == "a"


# --- the server ----------------------------------------------------------------------------------------------------


def test_without_a_given_port_the_demo_listens_on_the_first_free_one() -> None:
    """Two demos get two ports; a given port that is in use is refused."""
    with command_line.listen("127.0.0.1", None) as first, command_line.listen("127.0.0.1", None) as second:
        ports = [listener.getsockname()[1] for listener in (first, second)]
        assert command_line.FIRST_PORT <= ports[0] < ports[1]
        assert command_line.url_of(first) == f"http://127.0.0.1:{ports[0]}"
        assert command_line.is_loopback(first)
        with pytest.raises(Refusal, match=str(ports[0])):
            command_line.listen("127.0.0.1", ports[0])


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 5000, "a..b", "\0"])
def test_an_impossible_host_name_is_refused(host: str) -> None:
    with pytest.raises(Refusal, match="There is no address for the host name") as caught:
        command_line.listen(host, None)
    assert len(str(caught.value)) < 400


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such rights")
def test_gradios_temporary_folder_is_private_to_this_user_and_deleted_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []

    def run(arguments: Any, listener: Any, cache: str) -> None:
        folders.append(Path(cache))
        assert folders[0].stat().st_mode & 0o777 == 0o700 and folders[0].parent == tmp_path
        raise Refusal("seen.")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(demo, "run", run)
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    assert demo.main([]) == 1
    assert folders and not folders[0].exists()


def test_the_command_line_is_read_before_torch_is_imported() -> None:
    """torch takes seconds to import. Before that, invalid arguments are refused, and Ctrl-C has its handler. dir()
    lists lib_onediff's public names, although they are imported on first use."""
    code = (
        "import sys, lib_onediff.demo.__main__; assert 'torch' not in sys.modules;"
        "import lib_onediff; assert not set(lib_onediff.__all__) - set(dir(lib_onediff))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

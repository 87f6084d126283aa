"""Single pictures through a WebUI's own txt2img: the standalone host's, with the product's own script."""
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

pytest.importorskip("gradio")
pytest.importorskip("diffusers")

from tiny_model import tiny_sd15_pipeline

from lib_onediff.core.settings import Settings
from lib_onediff.demo.models import LoadedModel
from lib_onediff.demo.modules import modules_importable, paths, script_callbacks, scripts, sd_models, shared
from lib_onediff.runtime.runtime import runtime
from lib_onediff.ui.compare.job import TextToImage, request_of

ROOT = Path(__file__).resolve().parents[2]
ORDER = request_of(json.dumps({
    "prompt": "a fox", "neg_prompt": "", "seed": "5", "width": "64", "height": "64", "steps": "2", "cfg_scale": "7",
    "sampling": "Euler a",
}))


@pytest.fixture
def maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TextToImage]:
    """Makes pictures with a tiny model and scripts/onediff.py."""
    script_callbacks.callback_map.clear()
    monkeypatch.setattr(paths, "data_path", str(tmp_path))
    with modules_importable():
        script = scripts.load_module(str(ROOT / "scripts" / "onediff.py"))
        try:
            sd_models.use_model(LoadedModel(tiny_sd15_pipeline(), "tiny"))
            yield TextToImage(script.OneDiffScript, runtime.status)
            script_callbacks.call_all("script_unloaded")
        finally:
            sd_models.use_model(None)
            script_callbacks.callback_map.clear()


def pixels(image: Any) -> numpy.ndarray:
    return numpy.asarray(image, dtype=numpy.int16)


def test_pictures_are_made_with_the_settings_asked_for(maker: TextToImage) -> None:
    standing = runtime.settings
    off, on = maker.make(ORDER, Settings(enabled=False)), maker.make(ORDER, Settings(backend="eager"))
    assert (off.status["route"], on.status["route"]) == ("host", "plain")
    off_said, on_said = (made.image.info["parameters"] for made in (off, on))
    assert "OneDiff: off" in off_said and "OneDiff: on; backend eager" in on_said
    assert "Seed: 5," in on_said and "Size: 64x64" in on_said
    assert pixels(off.image).shape == (64, 64, 3) and abs(pixels(off.image) - pixels(on.image)).max() <= 1
    assert pixels(off.image).std() > 5 and off.seconds > 0
    assert runtime.settings == standing and shared.state.job == ""


def test_interrupted_picture_is_none(maker: TextToImage, monkeypatch: pytest.MonkeyPatch) -> None:
    from lib_onediff.demo.modules import processing

    made = processing.process_images

    def while_it_is_made(p: Any) -> Any:
        maker.interrupt()
        return made(p)

    maker.interrupt()
    assert not shared.state.interrupted, "an image that is none of ours goes on"
    monkeypatch.setattr(processing, "process_images", while_it_is_made)
    assert maker.make(ORDER, Settings()) is None
    monkeypatch.undo()
    assert maker.make(ORDER, Settings()).image.size == (64, 64)

"""The routes of A1111's REST API that tests call in the demo. As a program, this file starts the demo with these
routes."""
from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, FastAPI
from PIL import Image, PngImagePlugin

from lib_onediff.api.auth import protection
from lib_onediff.api.bodies import SentenceRoute, json_answer, refusal
from lib_onediff.core.refusal import Refusal
from lib_onediff.demo.modules import processing, script_callbacks, scripts, shared
from lib_onediff.demo.page import make_images

# The fields of a request that are a generation's, as A1111 has them when they are left out.
FIELDS = {
    "prompt": "", "negative_prompt": "", "seed": -1, "sampler_name": "Euler", "scheduler": "Automatic", "steps": 50,
    "batch_size": 1, "n_iter": 1, "cfg_scale": 7.0, "width": 512, "height": 512,
}
turn = threading.Lock()


def to_base64(image: Image.Image) -> str:
    """The base64 text of a PNG file with the image's infotext; equal images give equal texts."""
    texts = PngImagePlugin.PngInfo()
    file = io.BytesIO()
    texts.add_text("parameters", image.info["parameters"])
    image.save(file, format="PNG", pnginfo=texts)
    return base64.b64encode(file.getvalue()).decode("ascii")


def generate(body: dict[str, Any]) -> Any:
    """The response to a txt2img request: its images, and their infotexts. Raises Refusal if the demo does not generate
    it."""
    runner = scripts.scripts_txt2img
    fields = {name: body.get(name, usual) for name, usual in FIELDS.items()}
    arguments = script_arguments(body.get("alwayson_scripts", {}), runner)
    overrides = body.get("override_settings", {})
    with turn:
        # As in A1111, no callback runs for options that a request overrides.
        before = {name: shared.opts.data[name] for name in overrides}
        shared.opts.data.update(overrides)
        try:
            processed = make_images(processing.StableDiffusionProcessingTxt2Img(**fields), runner, arguments)
        finally:
            shared.opts.data.update(before)
    images = [to_base64(image) for image in processed.images]
    info = json.dumps({"infotexts": processed.infotexts, "comments": processed.comments})
    return json_answer({"images": images, "parameters": body, "info": info})


def script_arguments(given: dict[str, Any], runner: Any) -> list[Any]:
    """The arguments of all scripts: their defaults, replaced by those in the request. given: {"Title": {"args":
    [...]}}."""
    arguments = [0, *(control.value for control in runner.inputs[1:])]
    for name, body in given.items():
        (script,) = [script for script in runner.alwayson_scripts if script.name == name.lower()]
        values = body["args"][: script.args_to - script.args_from]
        arguments[script.args_from : script.args_from + len(values)] = values
    return arguments


def set_options(values: dict[str, Any]) -> None:
    unknown = [key for key in values if key not in shared.opts.data_labels]
    if unknown:
        raise Refusal(f"The option {unknown[0]} does not exist.")
    _, refused, trouble = shared.opts.set_and_save(values, shared.config_filename)
    if refused or trouble:
        raise Refusal(refused[0] if refused else trouble)


def refusing(work: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    """A function as `work`, which responds to a Refusal with an HTTP error instead of raising it."""
    def answer(body: dict[str, Any]) -> Any:
        try:
            return work(body)
        except Refusal as problem:
            return refusal(500 if "not finite" in str(problem) else 422, str(problem))

    return answer


def options() -> dict[str, Any]:
    labels = shared.opts.data_labels
    return {key: getattr(shared.opts, key) for key in labels}


def names_of_scripts() -> dict[str, list[str]]:
    return {"txt2img": [script.name for script in scripts.scripts_txt2img.alwayson_scripts]}


def add_rest(page: Any, app: FastAPI) -> None:
    router = APIRouter(route_class=SentenceRoute)
    for path, read in (
        ("options", options), ("scripts", names_of_scripts),
        ("progress", lambda: {"progress": shared.state.share_done(), "state": vars(shared.state)}),
    ):
        router.add_api_route(f"/sdapi/v1/{path}", read, methods=["GET"])
    for path, work in (
        ("txt2img", refusing(generate)), ("options", refusing(set_options)),
        ("interrupt", lambda: shared.state.interrupt()),
    ):
        router.add_api_route(f"/sdapi/v1/{path}", work, methods=["POST"])
    app.include_router(router, dependencies=protection(app, shared.cmd_opts))


def with_rest() -> None:
    """Add the routes to the demo of this process."""
    load = scripts.load_scripts

    def load_scripts() -> None:
        load()
        script_callbacks.on_app_started(add_rest)

    scripts.load_scripts = load_scripts


if __name__ == "__main__":
    from lib_onediff.demo.__main__ import leave, main

    with_rest()
    leave(main())

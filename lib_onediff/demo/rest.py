"""The REST API in A1111's shapes. Every error is JSON with a sentence in `detail`."""
from __future__ import annotations

import time
from collections.abc import Collection
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from ..api.answers import BoundedRequest, SentenceRoute, json_answer
from ..api.gate import LARGEST_BODY
from ..api.routes import PROBLEMS, described
from .images import to_base64
from .jobs import Client, WaitingRoom, make_images
from .modules import processing, scripts, sd_samplers, shared
from .refusal import Refusal
from .rest_models import GenerationRequest, GenerationResponse, Img2ImgRequest, Txt2ImgRequest


class ImagesRequest(BoundedRequest):
    """A request that may hold images."""

    largest_body = LARGEST_BODY


class ImagesRoute(SentenceRoute):
    request_class = ImagesRequest


def make_router() -> APIRouter:
    """The routes; scripts must have their user interface built before the first request."""
    router = APIRouter(route_class=ImagesRoute, responses=described(PROBLEMS))
    waiting_room = WaitingRoom()

    async def txt2img(body: Txt2ImgRequest, request: Request) -> Response:
        kind = processing.StableDiffusionProcessingTxt2Img
        return await waiting_room.make(request, partial(generate, kind, body, scripts.scripts_txt2img, ()))

    async def img2img(body: Img2ImgRequest, request: Request) -> Response:
        kind = processing.StableDiffusionProcessingImg2Img
        hidden = () if body.include_init_images else ("init_images", "mask")
        return await waiting_room.make(request, partial(generate, kind, body, scripts.scripts_img2img, hidden))

    add = router.add_api_route
    add("/internal/ping", lambda: {}, methods=["GET"])
    add("/sdapi/v1/txt2img", txt2img, methods=["POST"], response_model=GenerationResponse)
    add("/sdapi/v1/img2img", img2img, methods=["POST"], response_model=GenerationResponse)
    add("/sdapi/v1/options", get_options, methods=["GET"])
    add("/sdapi/v1/options", set_options, methods=["POST"])
    add("/sdapi/v1/progress", progress, methods=["GET"])
    add("/sdapi/v1/interrupt", interrupt, methods=["POST"])
    add("/sdapi/v1/samplers", list_samplers, methods=["GET"])
    add("/sdapi/v1/schedulers", list_schedulers, methods=["GET"])
    add("/sdapi/v1/sd-models", list_models, methods=["GET"])
    add("/sdapi/v1/scripts", list_scripts, methods=["GET"])
    add("/sdapi/v1/script-info", list_script_info, methods=["GET"])
    return router


def generate(kind: type, body: GenerationRequest, runner: Any, hidden: Collection[str], client: Client) -> Response:
    """hidden: what of the request its answer does not repeat."""
    p = kind(**body.arguments())
    check_options(body.override_settings or {})
    arguments = script_arguments(body.alwayson_scripts or {}, runner)
    processed = make_images(p, runner, arguments, served=client.served())
    images = [to_base64(image) for image in processed.images] if body.send_images else []
    parameters = {**dict(body), **dict.fromkeys(hidden)}
    return json_answer({"images": images, "parameters": parameters, "info": processed.js()})


def script_arguments(given: dict[str, Any], runner: Any) -> list[Any]:
    """The defaults of every script with what the request says of some: {"Title": {"args": [...]}}."""
    arguments = runner.default_arguments
    for name, body in given.items():
        script = next((script for script in runner.alwayson_scripts if script.name == name.lower()), None)
        if script is None:
            raise Refusal(f"There is no always on script {name!r} here.")
        values = body.get("args", []) if isinstance(body, dict) else None
        if not isinstance(values, list):
            raise Refusal(f'The arguments of script {name!r} must be given as {{"args": [...]}}.')
        values = values[: script.args_to - script.args_from]
        arguments[script.args_from : script.args_from + len(values)] = values
    return arguments


def get_options() -> dict[str, Any]:
    return {key: getattr(shared.opts, key) for key, info in shared.opts.data_labels.items() if not info.do_not_save}


def set_options(values: dict[str, Any]) -> None:
    """Set options and save them."""
    check_options(values)
    with shared.opts.lock:
        for key, value in values.items():
            shared.opts.set(key, value)
            if getattr(shared.opts, key) != value:
                raise Refusal(f"The option {key} did not accept {value!r}.")
        try:
            shared.opts.save(shared.config_filename)
        except OSError as error:
            raise Refusal(
                f"The options hold until the server ends; they could not be saved ({error.strerror}).", status=507
            ) from error


def check_options(values: dict[str, Any]) -> None:
    """Raise Refusal for options that do not exist or values that do not fit."""
    for key, value in values.items():
        info = shared.opts.data_labels.get(key)
        problem = info.problem(value) if info else "does not exist"
        if problem:
            raise Refusal(f"The option {key} {problem}.")


def progress(skip_current_image: bool = False) -> dict[str, Any]:
    """How far the generation in progress is, from 0 to 1, and the seconds that it still needs."""
    state = shared.state
    shown = {"progress": 0.0, "eta_relative": 0.0, "state": state.dict(), "current_image": None, "textinfo": None}
    if state.job_count <= 0 or state.time_start is None:
        return shown
    done = state.job_no / state.job_count
    if state.sampling_steps:
        done += state.sampling_step / state.sampling_steps / state.job_count
    done = min(max(done, 0.01), 1.0)
    elapsed = time.time() - state.time_start
    return {**shown, "progress": done, "eta_relative": elapsed / done - elapsed}


def interrupt() -> dict[str, Any]:
    shared.state.interrupt()
    return {}


def list_samplers() -> list[dict[str, Any]]:
    return [
        {"name": sampler.name, "aliases": list(sampler.aliases), "options": {"scheduler": sampler.automatic.lower()}}
        for sampler in sd_samplers.available()
    ]


def list_schedulers() -> list[dict[str, Any]]:
    return [{"name": name.lower(), "label": name, "aliases": None} for name in sd_samplers.SCHEDULES]


def list_models() -> list[dict[str, Any]]:
    name = shared.sd_model.name
    return [{"title": name, "model_name": name, "hash": None, "sha256": None, "filename": name, "config": None}]


def scripts_of(runner: scripts.ScriptRunner | None) -> list[Any]:
    return [] if runner is None else runner.scripts


def list_scripts() -> dict[str, list[str]]:
    runners = {"txt2img": scripts.scripts_txt2img, "img2img": scripts.scripts_img2img}
    return {tab: [script.name for script in scripts_of(runner) if script.name] for tab, runner in runners.items()}


def list_script_info() -> list[dict[str, Any]]:
    runners = (scripts.scripts_txt2img, scripts.scripts_img2img)
    return [script.api_info for runner in runners for script in scripts_of(runner) if script.api_info]

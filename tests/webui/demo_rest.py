"""Those routes of A1111's REST API by which the tests drive the demo. Run as a program it is the demo with them."""
from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from demo_images import from_base64, to_base64
from fastapi import APIRouter, FastAPI, Response
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from lib_onediff.api.answers import SentenceRoute, json_answer, refusal
from lib_onediff.api.auth import protection
from lib_onediff.demo import limits
from lib_onediff.demo.errors import Refusal
from lib_onediff.demo.generation_tab import make_images
from lib_onediff.demo.modules import processing, script_callbacks, scripts, sd_samplers, shared

MOST_WAITING = 64


class Txt2ImgRequest(BaseModel):
    """POST /sdapi/v1/txt2img, in A1111's names."""

    prompt: str = ""
    negative_prompt: str = ""
    seed: int = -1
    sampler_name: str = "Euler"
    scheduler: str = "Automatic"
    batch_size: int = 1
    n_iter: int = 1
    steps: int = 50
    cfg_scale: float = 7.0
    width: int = 512
    height: int = 512
    override_settings: dict[str, Any] = {}
    alwayson_scripts: dict[str, Any] = {}
    override_settings_restore_afterwards: bool = True
    enable_hr: bool = False

    def make(self) -> Any:
        return processing.StableDiffusionProcessingTxt2Img(**self.fields())

    def fields(self) -> dict[str, Any]:
        if self.enable_hr:
            raise Refusal("This host does not serve hires fix (enable_hr).")
        not_fields = {"override_settings", "override_settings_restore_afterwards", "alwayson_scripts", "enable_hr"}
        return limits.checked(self.model_dump(exclude={*not_fields, "init_images"}))


class Img2ImgRequest(Txt2ImgRequest):
    """POST /sdapi/v1/img2img; images are base64."""

    init_images: list[str]
    denoising_strength: float = 0.75

    def make(self) -> Any:
        if len(self.init_images) > self.batch_size:
            raise Refusal("There are more init images than images in a batch (batch_size).")
        images = [from_base64(image) for image in self.init_images]
        return processing.StableDiffusionProcessingImg2Img(**self.fields(), init_images=images)


def refusing(work: Callable[..., Any]) -> Any:
    """What work() returns, its refusals as answers."""
    try:
        return work()
    except Refusal as problem:
        return refusal(500 if "not finite" in str(problem) else 422, str(problem))


class RestApi:
    """The routes. Requests wait in the event loop: the server's threads are few."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._waiting = 0

    def router(self) -> APIRouter:
        router = APIRouter(route_class=SentenceRoute)
        add = router.add_api_route
        add("/internal/ping", lambda: {}, methods=["GET"])
        add("/sdapi/v1/txt2img", self.txt2img, methods=["POST"])
        add("/sdapi/v1/img2img", self.img2img, methods=["POST"])
        add("/sdapi/v1/options", self.get_options, methods=["GET"])
        add("/sdapi/v1/options", self.set_options, methods=["POST"])
        add("/sdapi/v1/progress", self.progress, methods=["GET"])
        add("/sdapi/v1/interrupt", self.interrupt, methods=["POST"])
        add("/sdapi/v1/samplers", self.samplers, methods=["GET"])
        add("/sdapi/v1/sd-models", self.models, methods=["GET"])
        add("/sdapi/v1/scripts", self.scripts, methods=["GET"])
        return router

    async def txt2img(self, body: Txt2ImgRequest) -> Response:
        return await self.answer(body, scripts.scripts_txt2img)

    async def img2img(self, body: Img2ImgRequest) -> Response:
        return await self.answer(body, scripts.scripts_img2img)

    async def answer(self, body: Txt2ImgRequest, runner: Any) -> Response:
        if self._waiting >= MOST_WAITING:
            return refusal(503, f"{MOST_WAITING} requests wait already; try again when there are fewer.")
        self._waiting += 1
        try:
            async with self._turn:
                return await run_in_threadpool(lambda: refusing(lambda: generate(body, runner)))
        finally:
            self._waiting -= 1

    def get_options(self) -> dict[str, Any]:
        labels = shared.opts.data_labels
        return {key: getattr(shared.opts, key) for key, info in labels.items() if not info.do_not_save}

    def set_options(self, values: dict[str, Any]) -> Any:
        return refusing(lambda: set_options(values))

    def progress(self) -> dict[str, Any]:
        return {"progress": shared.state.share_done(), "state": vars(shared.state)}

    def interrupt(self) -> dict[str, Any]:
        shared.state.interrupt()
        return {}

    def samplers(self) -> list[dict[str, Any]]:
        return [{"name": name} for name in sd_samplers.visible_sampler_names()]

    def models(self) -> list[dict[str, Any]]:
        return [{"title": shared.sd_model.name, "model_name": shared.sd_model.name, "hash": None}]

    def scripts(self) -> dict[str, list[str]]:
        runners = {"txt2img": scripts.scripts_txt2img, "img2img": scripts.scripts_img2img}
        return {tab: [script.name for script in runner.alwayson_scripts] for tab, runner in runners.items()}


def generate(body: Txt2ImgRequest, runner: Any) -> Response:
    """The answer to a generation. Raises Refusal."""
    p, arguments = body.make(), script_arguments(body.alwayson_scripts, runner)
    check_options(body.override_settings)
    with overridden(body):
        processed = make_images(p, runner, arguments)
    images = [to_base64(image) for image in processed.images]
    return json_answer({"images": images, "parameters": {**dict(body), "init_images": None}, "info": processed.js()})


@contextmanager
def overridden(body: Txt2ImgRequest) -> Iterator[None]:
    """Have the options that a request overrides in force, as A1111 does: nobody is told."""
    before = dict(shared.opts.data)
    shared.opts.data.update(body.override_settings)
    try:
        yield
    finally:
        if body.override_settings_restore_afterwards:
            shared.opts.data.update({name: before[name] for name in body.override_settings if name in before})


def script_arguments(given: dict[str, Any], runner: Any) -> list[Any]:
    """The defaults of every script with what the request says of some: {"Title": {"args": [...]}}."""
    arguments = [0, *(control.value for control in runner.inputs[1:])]
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


def set_options(values: dict[str, Any]) -> None:
    check_options(values)
    _, problems = shared.opts.set_and_save(values, shared.config_filename)
    if problems:
        raise Refusal(problems[0])


def check_options(values: dict[str, Any]) -> None:
    """Raise Refusal for options that do not exist or values that do not fit."""
    for key, value in values.items():
        info = shared.opts.data_labels.get(key)
        problem = info.problem(value) if info else "does not exist"
        if problem:
            raise Refusal(f"The option {key} {problem}.")


def add_rest(page: Any, app: FastAPI) -> None:
    app.include_router(RestApi().router(), dependencies=protection(app, shared.cmd_opts))


def with_rest() -> None:
    """Have the demo of this process serve the routes too."""
    load = scripts.load_scripts

    def load_scripts() -> None:
        load()
        script_callbacks.on_app_started(add_rest)

    scripts.load_scripts = load_scripts


if __name__ == "__main__":
    from lib_onediff.demo.__main__ import leave, main

    with_rest()
    leave(main())

"""Serves images over HTTP with Ray Serve: serve run lib_onediff.serving.ray_serve:app model=FOLDER replicas=2."""
from __future__ import annotations

import asyncio
import io
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, Response
from fastapi.middleware import Middleware
from pydantic import BaseModel
from ray import serve

from ..api.bodies import SentenceRoute
from ..api.gate import LARGEST_LOGIN, Gate, Origins, host_name
from ..core.sizes import parse_sizes
from ..public import compile_pipe, load_folder
from ..runtime.runtime import runtime
from .queue import Limits, Queue, Request

# Enough for a shape to be checked, captured and replayed.
WARM_STEPS = 4
# How many of the most used sizes a replica makes ready if Config.sizes is empty.
MOST_WARM_SIZES = 8
# Images that fail in a row until Ray Serve replaces the replica.
FAILURES_UNTIL_REPLACED = 3
# How long a replica may take to finish its images when the service shuts down.
SECONDS_TO_END = 600
# Requests at a replica: the image in progress, and the next one, so that the GPU does not wait for it.
AT_A_REPLICA = 2
log = logging.getLogger("onediff")


class Config(BaseModel, extra="forbid"):
    """The arguments of the application, as given to `serve run` or in its YAML file.

    model: a folder in diffusers' layout. replicas: the number of processes that make images.
    gpus: for each replica, which may be a fraction; 0: it computes on the CPU.
    cache: the cache folder; "": that of the environment variable ONEDIFF_CACHE, or none.
    sizes: the sizes that a replica makes ready before it serves, as "1024x1024, 832x1216" ("x2" for two images has no
        effect here); "": the model's most used ones in the cache folder, which are none without a folder.
    guidance: the CFG scale with which these sizes are made ready.
    allowed_hosts: the Host names that requests may have besides IP addresses and localhost, separated by commas; "*":
        any.
    limits: see Limits. options: keyword arguments of compile_pipe.
    """

    model: str = ""
    replicas: int = 1
    gpus: float = 1
    cache: str = ""
    sizes: str = ""
    guidance: float = 7.5
    allowed_hosts: str = ""
    limits: Limits = Limits()
    options: dict[str, Any] = {}


def load(config: Config) -> Any:
    """The diffusers pipeline of config.model, not compiled yet: on the GPU in float16, or on the CPU in float32 if
    config.gpus is 0."""
    device, dtype = ("cuda", torch.float16) if config.gpus else ("cpu", torch.float32)
    return load_folder(Path(config.model).expanduser(), dtype).to(device)


class Painter:
    """One replica: a process of Ray Serve that makes images. __init__ loads the model and makes sizes ready, which
    takes minutes; Ray Serve sends requests after that."""

    def __init__(self, load: Callable[[Config], Any], config: Config) -> None:
        """load: returns the diffusers pipeline, which is compiled here. What it raises is raised, as is ValueError for
        Config.sizes that cannot be read and what the pipeline raises at one of these sizes: the replica does not
        start."""
        # One thread makes all images, because CUDA libraries keep handles and workspaces for each thread.
        self._thread = ThreadPoolExecutor(1)
        self._failures = 0
        if config.cache:
            os.environ["ONEDIFF_CACHE"] = config.cache
        self._pipe = self._thread.submit(lambda: compile_pipe(load(config), **config.options)).result()
        self._pipe.set_progress_bar_config(disable=True)
        known = runtime.history.most_used(runtime.model_name(self._pipe.unet), MOST_WARM_SIZES)
        for size in parse_sizes(config.sizes) or [wanted.size for wanted in known]:
            warm = Request("", "", size.width, size.height, WARM_STEPS, config.guidance, seed=0)
            self._thread.submit(self._image, warm).result()
        runtime.keep_history()

    async def make(self, request: Request) -> bytes | str:
        """The image of a request as a PNG; a sentence for the client if it failed, with the traceback in the log."""
        try:
            png = await asyncio.get_running_loop().run_in_executor(self._thread, self._image, request)
        except Exception:
            log.exception("an image of %sx%s failed", request.width, request.height)
            self._failures += 1
            return "The image could not be made; the reason is in the replica's log."
        self._failures = 0
        return png

    def check_health(self) -> None:
        """Raise RuntimeError after FAILURES_UNTIL_REPLACED failed images in a row. Ray Serve calls this regularly, and
        replaces the replica if it raises: some CUDA errors make the process unusable."""
        if self._failures >= FAILURES_UNTIL_REPLACED:
            raise RuntimeError(f"{self._failures} images in a row failed")

    def _image(self, request: Request) -> bytes:
        """The image of a request as a PNG. Runs in the replica's one thread that makes images; raises what the pipeline
        raises. A seed of None counts as 0."""
        file = io.BytesIO()
        generator = torch.Generator("cpu").manual_seed(request.seed or 0)
        self._pipe(
            request.prompt, negative_prompt=request.negative_prompt, width=request.width, height=request.height,
            num_inference_steps=request.steps, guidance_scale=request.guidance, generator=generator,
        ).images[0].save(file, "PNG")
        return file.getvalue()


class Front:
    """The process of Ray Serve that takes requests over HTTP, queues them, and gives them to the replicas. It needs no
    GPU."""

    def __init__(self, painter: Any, config: Config) -> None:
        """painter: Ray Serve's handle of all Painters; it chooses a replica for each call of a method."""
        self.queue = Queue(painter.make.remote, config.limits, config.replicas * AT_A_REPLICA)

    async def end(self) -> None:
        """Refuse new requests from now on, and return when all earlier ones are over."""
        await self.queue.end()


# Routes are functions, not methods of Front: Ray makes the routes of a class anew, and not as SentenceRoutes.
def front() -> Front:
    """The Front that this process serves. Call it only in a process of Ray Serve."""
    return serve.get_replica_context().servable_object


async def image(request: Request) -> Response:
    """POST /image: the image of a request as a PNG, with its seed in the header X-OneDiff-Seed. Raises HTTPException as
    Queue.answer does."""
    png, request = await front().queue.answer(request)
    return Response(png, media_type="image/png", headers={"X-OneDiff-Seed": str(request.seed)})


async def ready(response: Response) -> dict[str, Any]:
    """GET /ready: whether the service makes images, for load balancers: "ready", "replicas" (how many are ready),
    "waiting" and "answered" (requests). The HTTP status is 503 until a replica is ready, and while the service shuts
    down."""
    status = await asyncio.to_thread(serve.status)
    queue = front().queue
    painters = status.applications[serve.get_replica_context().app_name].deployments["Painter"]
    warm = painters.replica_states.get("RUNNING", 0)
    is_ready = warm > 0 and not queue.ending
    response.status_code = 200 if is_ready else 503
    return {"ready": is_ready, "replicas": warm, "waiting": queue.waiting, "answered": queue.answered}


def http(config: Config) -> FastAPI:
    """The HTTP application of a Front: POST /image and GET /ready. It refuses requests of foreign origins, and those
    whose Host names Config.allowed_hosts does not allow, by api.gate, as the demo does."""
    names = {host_name(name.strip()) for name in config.allowed_hosts.split(",")} - {""}
    origins = Origins(strict_host="*" not in names, names=names)
    # There are no logins, so the gate gets no function that identifies a user.
    gate = Middleware(Gate, origins=origins, largest=LARGEST_LOGIN)
    app = FastAPI(title="OneDiff", middleware=[gate])
    app.router.route_class = SentenceRoute
    app.add_api_route("/image", image, methods=["POST"])
    app.add_api_route("/ready", ready)
    return app


def app(arguments: dict[str, Any]) -> serve.Application:
    """The application for Ray's `serve run` and `serve deploy`, which call this.

    arguments: the fields of Config, by name. pack and digest are ignored: earlier versions had them for cache packs.
    Raises pydantic's ValidationError for an unknown or wrong argument.
    """
    return build(Config(**{name: value for name, value in arguments.items() if name not in ("pack", "digest")}))


def build(config: Config, load: Callable[[Config], Any] = load) -> serve.Application:
    """The Ray Serve application, not started yet: a Front, and config.replicas Painters. load: returns the pipeline of
    a replica; by default it reads config.model."""
    painter = serve.deployment(Painter).options(
        num_replicas=config.replicas, max_ongoing_requests=AT_A_REPLICA, ray_actor_options={"num_gpus": config.gpus},
        graceful_shutdown_timeout_s=SECONDS_TO_END,
    )
    front = serve.deployment(serve.ingress(http(config))(Front)).options(
        name="Front", max_ongoing_requests=10_000, graceful_shutdown_timeout_s=SECONDS_TO_END,
    )
    return front.bind(painter.bind(load, config), config)


def end(name: str = "default") -> None:
    """Shut the service down: refuse new requests, wait until all earlier ones are over, however long that takes, and
    delete the application. name: the application's in Ray Serve. Call it in any process that is connected to the Ray
    cluster."""
    serve.get_app_handle(name).end.remote().result()
    serve.delete(name)

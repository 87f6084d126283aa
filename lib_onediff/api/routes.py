"""The routes /onediff/v1/...: each reads or changes the runtime or the list of jobs, and answers in plain values."""
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Body, FastAPI, HTTPException, Path, Query, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..core.guard import outcome_of
from ..core.jobs import Job, JobQueue
from ..core.sizes import parse_sizes
from ..prewarm.worker import SizeJob, rows_with_jobs
from . import bodies
from .auth import protection
from .bodies import SentenceRoute, json_answer

if TYPE_CHECKING:
    from ..prewarm.worker import WarmUp
    from ..runtime.runtime import Runtime

Result = TypeVar("Result")
Status = Callable[[], dict[str, Any]]
PREFIX = "/onediff/v1"
TAG = "OneDiff"
# Job.source of the sizes that the API queues.
SOURCE = "API"
MOST_PENDING = 500
FULL = f"At most {MOST_PENDING} sizes may wait in the queue, so none of these was added; try again when it is shorter."
NOT_KNOWN = "OneDiff cannot tell whether this process is ready: see the WebUI's console."
NO_RESOLUTION = (
    f"OneDiff has no such resolution or model in its list, so nothing was changed; GET {PREFIX}/shapes has the list."
)
WHAT_TO_PURGE = (
    'Nothing was purged. Give one of: {"resolutions": ["512x512"]} (add "model" for one model only), {"model": "SD1"}, '
    '{"disk": true}, {"all": true}.'
)
PROBLEMS = {401: "Not logged in.", 403: "Sent by a page of another site.", 422: "The request is not usable."}
FIELDS_OF_A_JOB = (
    "id", "kind", "title", "source", "state", "unit", "done", "total", "share", "seconds", "seconds_left", "what",
    "reason",
)
JobId = Path(..., ge=1, le=bodies.LARGEST_NUMBER, description="As GET jobs names it.")


def add_routes(
    app: FastAPI, cmd_opts: Any, runtime: Runtime, warmup: WarmUp, queue: JobQueue,
    exclusively: Callable[[Callable[[], Any]], Any], status: Status,
) -> None:
    """Add the routes of the API to `app`, the WebUI's application, if the WebUI serves its own API: with --api or
    --nowebui. Otherwise does nothing.

    cmd_opts: the WebUI's command line. queue: the list of all jobs. exclusively: runs a function while no image is
    being made, and returns its result. status: returns the values of GET status, except `ready` and `ready_reason`.
    """
    if not (getattr(cmd_opts, "api", False) or getattr(cmd_opts, "nowebui", False)):
        return
    routes = Routes(runtime, warmup, queue, exclusively, status)
    checked = protection(app, cmd_opts)
    busy = {409: "An image is being made."}
    unknown = {404: "OneDiff has no such job, resolution or model."}
    full = {507: "Done, but it could not be written to the disk."}
    methods: dict[str, list[str]] = {}

    def add(path: str, route: Callable[..., Response], problems: Mapping[int, str] = PROBLEMS, **more: Any) -> None:
        methods.setdefault(path, []).extend(more.get("methods", ["GET"]))
        described: Any = {status: {"description": meaning} for status, meaning in {**PROBLEMS, **problems}.items()}
        # Not through a router of our own: FastAPI would read each route's signature once more.
        app.router.add_api_route(
            f"{PREFIX}{path}", route, tags=[TAG], route_class_override=SentenceRoute, dependencies=checked,
            responses=described, **more,
        )

    add("/status", routes.status, {503: "Not ready (only with probe=true)."},
        summary="How the last step was computed, and why")
    add("/shapes", routes.shapes, summary="Every resolution and its state")
    add("/prewarm", routes.prewarm, {409: "OneDiff is off.", 429: "The queue is full."}, methods=["POST"],
        status_code=202, summary="Pre-warm sizes")
    add("/jobs", routes.jobs, summary="Jobs that run, wait or have ended")
    add("/jobs", routes.clear, methods=["DELETE"], summary="Remove ended jobs from the list")
    add("/jobs/{id}", routes.job, unknown, summary="One job")
    add("/jobs/{id}", routes.cancel, {**unknown, 409: "The job has already ended."}, methods=["DELETE"],
        summary="Cancel a job")
    add("/purge", routes.purge, {**unknown, **busy, **full}, methods=["POST"], summary="Purge resolutions")
    add("/pin", routes.pin, {**unknown, **full}, methods=["POST"], summary="Pin or unpin a resolution")
    add("/release", routes.release, busy, methods=["POST"], summary="Free GPU memory")
    # Otherwise a page that is mounted after these routes would answer that the path does not exist.
    for path, allowed in methods.items():
        app.router.routes.append(Route(f"{PREFIX}{path}", WrongMethod(allowed), include_in_schema=False))


class WrongMethod:
    """An ASGI application for a path of the API, after its routes: answers 405 to every request, that is to methods
    that no route of the path takes."""

    def __init__(self, allowed: Sequence[str]) -> None:
        """allowed: the methods that the path takes, such as "GET"."""
        self._allowed = ", ".join(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request with 405, and name the allowed methods."""
        sentence = f"This path takes {self._allowed}, not {scope['method']}."
        await bodies.refusal(405, sentence, {"Allow": self._allowed})(scope, receive, send)


class Routes:
    """The handlers of the routes. The WebUI's /docs shows their docstrings; .readme/api.md describes the answers'
    fields."""

    def __init__(
        self, runtime: Runtime, warmup: WarmUp, queue: JobQueue, exclusively: Callable[[Callable[[], Any]], Any],
        status: Status,
    ) -> None:
        """warmup: queues sizes. queue: the list of all jobs. exclusively, status: see add_routes."""
        self._runtime = runtime
        self._warmup = warmup
        self._queue = queue
        self._status = status
        self._exclusively = exclusively
        self._turn = threading.Lock()

    def status(
        self, probe: bool = Query(False, description="Answer 503 while not ready: for probes that ignore the body."),
    ) -> Response:
        """The last UNet call, its route and the reason for it, and whether everything that should be ready is ready.

        `ready` is for load balancers. It is false until the checkpoint that the WebUI loads by itself is loaded, and
        while sizes of the settings or of users are queued or pre-warmed; `ready_reason` then has a sentence. A size
        that fails does not delay it. If the rest of the status cannot be read, the answer has only these two.
        """
        part: Any = partial(self._runtime.guard.attempt, "the status")
        waits_for = part(self._warmup.why_not_ready, NOT_KNOWN)
        if probe and waits_for:
            raise HTTPException(503, waits_for)
        ready = {"ready": not waits_for, "ready_reason": waits_for}
        answer = part(lambda: json_answer({**part(self._status, {}), **ready}))
        return answer or json_answer(ready)

    def shapes(
        self, model: str | None = Query(None, min_length=1, max_length=bodies.LONGEST_NAME,
                                        description="Only resolutions of this model, as rows name it."),
    ) -> Response:
        """One row for each resolution of each model, the most recently used first, with its kinds of UNet calls; and
        the totals of all models.

        Sizes in the pre-warm queue are "queued" or "warming 33 %"; those that only earlier processes used are "on
        disk". An unknown model has no rows.
        """
        rows = rows_with_jobs(self._runtime.rows(), self._warmup.jobs(), self._warmup.model)
        chosen = [asdict(row) for row in rows if model in (None, row.model)]
        return json_answer({"rows": chosen, "totals": asdict(self._runtime.totals())})

    def prewarm(self, body: bodies.PrewarmBody) -> Response:
        """Queue sizes. They are pre-warmed one by one, between images and never during an image.

        Answers at once with a job for each size. A size that runs or waits already keeps its job. Without an answer
        202, no size was queued: 422 for sizes that are not possible, 429 if too many wait already, 409 while OneDiff is
        switched off.
        """
        try:
            sizes = parse_sizes(body.sizes)
            if not sizes:
                raise ValueError("Give at least one size, for example 768x512.")
            if len(sizes) + sum(job.pending for job in self._warmup.jobs()) > MOST_PENDING:
                raise HTTPException(429, FULL)
            jobs = self._warmup.add(sizes, SOURCE, tokens=body.tokens, first=body.order == "first")
        except ValueError as problem:
            raise HTTPException(422 if self._runtime.settings.enabled else 409, str(problem)) from problem
        return json_answer({"jobs": list(map(job_values, jobs))}, 202)

    def jobs(self) -> Response:
        """The jobs: images, comparisons and sizes to pre-warm, first the finished, then the running and waiting ones,
        in their order. Finished images leave the list."""
        return json_answer({"jobs": list(map(job_values, self._queue.jobs()))})

    def clear(self) -> Response:
        """Remove finished jobs from the list, and answer how many (`cleared`). The images of a comparison are deleted
        with it."""
        return json_answer({"cleared": self._queue.clear()})

    def job(self, id: int = JobId) -> Response:
        """One job, while it waits or runs and for some time afterwards."""
        return json_answer(job_values(self._job(id)))

    def cancel(self, id: int = JobId) -> Response:
        """Remove a job from the queue, or end it after its current UNet call or step. What is ready by then stays
        ready. Answers with the job as it is then; 404 if there is no such job, 409 if it had ended before."""
        job = self._job(id)
        if not self._queue.cancel(id):
            raise HTTPException(409, f"Job {id} has already ended ({self._job(id).state}).")
        # If many jobs have finished, a cancelled one leaves the list at once; so does an image.
        return json_answer(job_values(next((now for now in self._queue.jobs() if now.id == id), job)))

    def _job(self, job_id: int) -> Job:
        """The job of this id. Raises HTTPException 404 if there is none."""
        found = next((job for job in self._queue.jobs() if job.id == job_id), None)
        if found is None:
            raise HTTPException(404, f"There is no job {job_id}; GET {PREFIX}/jobs lists all jobs.")
        return found

    def purge(self, body: bodies.PurgeBody) -> Response:
        """Forget resolutions: their graphs, checks and timings, in memory and on the disk.

        Give one of `{"resolutions": ["512x512"]}`, with `"model"` for one model only; `{"model": "SD1"}` for all of a
        model; `{"disk": true}` for everything on the disk, while graphs in memory stay; `{"all": true}` for everything.
        Anything else is refused with 422, and resolutions that OneDiff does not know with 404. The VAE's decodes belong
        to no model: they are purged with their resolution, unless a model is named. Files of a newer version of OneDiff
        in the same folder stay. Waits at most `wait` seconds for an image in progress; after that, the answer is 409
        and nothing is purged. The pre-warm queue goes on, so first cancel sizes that should not come back.

        Answers with the bytes that became free in GPU memory (`vram`) and on the disk (`disk`), and the resolutions.
        """
        if sum((body.all, body.disk, bool(body.resolutions or body.model))) != 1:
            raise HTTPException(422, WHAT_TO_PURGE)
        resolutions = None if body.resolutions is None else set(body.resolutions)
        gone = [] if body.disk else [
            row for row in self._runtime.rows()
            if (resolutions is None or row.resolution in resolutions) and body.model in (None, row.model)
        ]
        if (resolutions or body.model) and not gone:
            raise HTTPException(404, NO_RESOLUTION)

        def purge() -> tuple[int, int]:
            vram = 0 if body.disk else self._runtime.purge(resolutions, body.model)
            return vram, self._runtime.purge_disk() if body.disk or body.all else 0

        vram, disk = self._between_images(purge, body.wait)
        purged = [{"resolution": row.resolution, "model": row.model} for row in gone]
        return json_answer({"vram": vram, "disk": disk, "purged": purged})

    def pin(self, body: bodies.PinBody) -> Response:
        """Pin a resolution, so that its graphs stay when another model needs memory, or unpin it. Restarts do not
        change this. Answers with the request's values; 404 for a resolution that OneDiff does not know."""
        if not self._runtime.pin(body.resolution, body.model, body.pinned):
            raise HTTPException(404, NO_RESOLUTION)
        return json_answer(dict(body))

    def release(self, body: bodies.ReleaseBody = Body(bodies.ReleaseBody())) -> Response:  # noqa: B008
        """Free all GPU memory of graphs, weights in 8 bits, copies of weights and torch's caches. They are made again
        when they are used. A model's copy on a second GPU stays.

        Answers with the bytes that became free (`vram`). Waits at most `wait` seconds for an image in progress; after
        that, the answer is 409 and nothing is released.
        """
        return json_answer({"vram": self._between_images(self._runtime.release_memory, body.wait)})

    def _between_images(self, work: Callable[[], Result], seconds: float) -> Result:
        """Run work() while the WebUI makes no image, and return its result or raise its exception. If work() could not
        begin within so many seconds, because of an image or of another such request, it is never run, and HTTPException
        409 is raised. Once it has begun, its end is awaited, however long it takes.

        The WebUI's own lock has no timeout, so a thread waits for it, one for all requests at a time.
        """
        deadline = time.monotonic() + seconds
        busy = HTTPException(
            409, f"An image is being made and was not done after {seconds:g} s, so nothing was changed; try again, or "
            "give a longer wait."
        )
        if not self._turn.acquire(timeout=seconds):
            raise busy
        turn: Future[Future[Any]] = Future()

        def wait() -> None:
            # If the request has given up by then, the work is not done.
            made = outcome_of(lambda: self._exclusively(lambda: turn.set_running_or_notify_cancel() and work()))
            self._turn.release()
            if not turn.cancelled():
                turn.set_result(made)

        threading.Thread(target=wait, name="onediff-api", daemon=True).start()
        try:
            return turn.result(deadline - time.monotonic()).result()
        except NotInTime:
            if turn.cancel():
                raise busy from None
        return turn.result().result()


def job_values(job: Job) -> dict[str, Any]:
    """A job as plain values, by the names of FIELDS_OF_A_JOB; for a size to pre-warm also its width, height, batch,
    size, tokens and number of calls made."""
    values = {name: getattr(job, name) for name in FIELDS_OF_A_JOB}
    if isinstance(job, SizeJob):
        values.update(asdict(job.size), size=str(job.size), tokens=job.tokens, made=job.made)
    return values

"""Generations on request, for the REST API and the page: checks, the queue, files, and errors as sentences."""
from __future__ import annotations

import asyncio
import contextlib
import datetime
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
from fastapi import Request

from . import errors, limits
from .images import png_bytes
from .modules import paths, shared
from .modules.call_queue import queue_lock
from .modules.devices import NansException, torch_gc
from .modules.processing import Processed, process_images
from .modules.shared import STOP
from .refusal import Refusal

MOST_WAITING = 64
SECONDS_BETWEEN_LOOKS = 0.2
Result = TypeVar("Result")


def make_images(
    p: Any, runner: Any, script_args: list[Any], served: AbstractContextManager[None] | None = None
) -> Processed:
    """Wait for the queue and make the images of p, a StableDiffusionProcessing.

    served: stands around the making, and may refuse it. Raises Refusal with a sentence for the user, whatever goes
    wrong.
    """
    limits.check(p)
    try:
        with queue_lock, contextlib.closing(p), job(runner), served or contextlib.nullcontext():
            p.sd_model = shared.sd_model
            p.scripts, p.script_args = runner, tuple(script_args)
            processed = process_images(p)
            if shared.opts.samples_save and not p.do_not_save_samples:
                save(processed, kind=type(p).__name__.removeprefix("StableDiffusionProcessing").lower())
            return processed
    except Refusal:
        raise
    except Exception as error:
        raise explain(error) from error


@contextlib.contextmanager
def job(runner: Any) -> Iterator[None]:
    """Mark the host as busy. Raises Refusal when it stops."""
    if shared.state.server_command == STOP:
        raise Refusal("The server stops.", status=503)
    shared.state.begin(job="img2img" if any(script.is_img2img for script in runner.scripts) else "txt2img")
    try:
        yield
    finally:
        shared.state.end()


def explain(error: Exception) -> Refusal:
    """What a failed generation says to the user."""
    if isinstance(error, NansException):
        return Refusal(str(error), status=500)
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error):
        torch_gc()
        return Refusal("There is not enough memory for this image; try a smaller size or batch.", status=500)
    errors.report("A generation failed", exc_info=True)
    first_line = (str(error).strip() or "no details").splitlines()[0]
    return Refusal(f"The generation failed: {type(error).__name__}: {first_line}", status=500)


def save(processed: Processed, kind: str) -> None:
    """Write every image to <data folder>/<kind>-images/<day>/<number>-<seed>.png; a full disk is reported only."""
    day = datetime.date.today().isoformat()
    folder = Path(paths.data_path, f"{kind}-images", day)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number = max((leading_number(file) for file in folder.glob("*.png")), default=-1) + 1
        for index, image in enumerate(processed.images):
            file = folder / f"{number + index:05}-{processed.all_seeds[index]}.png"
            file.write_bytes(png_bytes(image))
    except OSError as error:
        errors.report(f"The images could not be saved to {folder}: {error}")


def leading_number(file: Path) -> int:
    """The number that a saved image's name starts with; -1 for other files."""
    number = file.name.split("-")[0]
    return int(number) if number.isdigit() else -1


class Client:
    """Somebody who waits for images. Who leaves gets none, and nobody else loses one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = self._served = False

    def leave(self) -> None:
        """End what is being made for this client, and begin nothing more."""
        with self._lock:
            self._left = True
            if self._served:
                shared.state.interrupt()

    @contextlib.contextmanager
    def served(self) -> Iterator[None]:
        """Stands around the making of the images. Raises Refusal where nobody waits for them any more."""
        with self._lock:
            if self._left:
                raise Refusal("The client has left.", status=499)
            self._served = True
        try:
            yield
        finally:
            with self._lock:
                self._served = False


class WaitingRoom:
    """Threads of its own for the requests that wait: the server's are few, and interrupt and progress need them."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MOST_WAITING, "onediff-images")
        self._waiting = threading.BoundedSemaphore(MOST_WAITING)

    async def make(self, request: Request, work: Callable[[Client], Result]) -> Result:
        """What work() returns or raises. Raises Refusal where too many wait, where the client has gone, and where the
        server stops: connections are cut soon after."""
        if not self._waiting.acquire(blocking=False):
            raise Refusal(f"{MOST_WAITING} requests wait already; try again when there are fewer.", status=503)
        client = Client()
        future = self._threads.submit(work, client)
        future.add_done_callback(lambda done: self._waiting.release())
        made = asyncio.wrap_future(future)
        while not (await asyncio.wait([made], timeout=SECONDS_BETWEEN_LOOKS))[0]:
            stops = shared.state.server_command == STOP
            if stops or await request.is_disconnected():
                client.leave()
                # Nobody looks at what becomes of it.
                made.add_done_callback(lambda done: done.cancelled() or done.exception())
                raise Refusal("The server stops.", 503) if stops else Refusal("The client has left.", 499)
        return made.result()

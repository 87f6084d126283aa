"""A first-come, first-served queue of image requests, with limits and retries. It does not depend on Ray."""
from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from fastapi import HTTPException

from ..core.sizes import Size

log = logging.getLogger("onediff")
# How often end() looks whether the queue is empty.
SECONDS_BETWEEN_LOOKS = 0.1


@dataclass(frozen=True)
class Request:
    """The request of one image, as a client posts it in JSON.

    width, height: in pixels. steps: of the sampling. guidance: the CFG scale. seed: None for a random one, which
    Limits.accept draws, so that a retry makes the same image.
    """

    prompt: str
    negative_prompt: str = ""
    width: int = 1024
    height: int = 1024
    steps: int = 30
    guidance: float = 7.5
    seed: int | None = None
    # Reject misspelt fields.
    __pydantic_config__: ClassVar = {"extra": "forbid"}


@dataclass(frozen=True)
class Limits:
    """The largest values that a request may have, and those of the queue.

    pixels: width * height. steps: of the sampling. guidance: the CFG scale.
    letters: of both prompts together.
    waiting: the largest number of requests that wait to be begun.
    tries: how often a request is begun in all, if replicas die while they make its image.
    """

    pixels: int = 1536 * 1536
    steps: int = 50
    letters: int = 2000
    guidance: float = 30.0
    waiting: int = 100
    tries: int = 3
    __pydantic_config__: ClassVar = {"extra": "forbid"}

    def accept(self, request: Request) -> Request:
        """The request, with a random seed if it has none. Raises HTTPException 422, with a sentence for the client, if
        steps, guidance, the seed, or the letters of both prompts are out of range, or if no image of this size can be
        made (see core.sizes.Size), or none within `pixels`."""
        try:
            Size(request.width, request.height)
        except ValueError as problem:
            raise HTTPException(422, str(problem)) from None
        for name, value, least, most in (
            ("width x height", request.width * request.height, 1, self.pixels), ("steps", request.steps, 1, self.steps),
            ("guidance", request.guidance, 0, self.guidance), ("seed", request.seed or 0, 0, 2**32 - 1),
            ("letters of the prompts", len(request.prompt + request.negative_prompt), 0, self.letters),
        ):
            if not least <= value <= most:
                raise HTTPException(422, f"{name} must be from {least} to {most}, not {value}.")
        return request if request.seed is not None else replace(request, seed=secrets.randbits(32))


class Queue:
    """A first-come, first-served queue of requests. All methods run in one event loop.

    waiting: the number of accepted requests that are not begun.
    answered: the number of begun requests that are over, also if they failed or their client has hung up.
    ending: whether end() was called, so that new requests are refused.
    """

    def __init__(self, make: Callable[[Request], Awaitable[bytes | str]], limits: Limits, lanes: int) -> None:
        """make: makes the image of a request, as the bytes of a PNG; returns a sentence for the client if that failed.
            If it raises an exception, the replica has died, and make is called again.
        lanes: how many requests may be with `make` at the same time.
        """
        self._make = make
        self._limits = limits
        self._lanes = asyncio.Semaphore(lanes)
        self.waiting = 0
        self.answered = 0
        self._making = 0
        self.ending = False

    async def answer(self, request: Request) -> tuple[bytes, Request]:
        """Wait for the image of a request. Returns the image, and the request with the seed that was used.

        Raises HTTPException with a sentence for the client: 422 for a value outside of its limits, 429 if the queue is
        full, 500 if the image failed, 503 if the service shuts down or the replica died at every try.
        """
        request = self._limits.accept(request)
        if self.ending:
            raise HTTPException(503, "The service is shutting down.")
        if self.waiting >= self._limits.waiting:
            raise HTTPException(429, f"{self.waiting} requests are already waiting; try again later.")
        self.waiting += 1
        try:
            await self._lanes.acquire()
        finally:
            # Also for a client that hung up while it waited.
            self.waiting -= 1
        self._making += 1
        try:
            return await self._image(request), request
        finally:
            self._making -= 1
            self.answered += 1
            self._lanes.release()

    async def _image(self, request: Request) -> bytes:
        """The image of a request whose turn has come, begun anew if the replica dies, up to Limits.tries times in all.
        Raises HTTPException 500 with the sentence of `make` if the image failed, which is not tried again, and 503 if
        the replica died at every try."""
        for _ in range(self._limits.tries):
            try:
                answer = await self._make(request)
            except Exception:
                log.warning("a replica failed during an image of %sx%s", request.width, request.height, exc_info=True)
                continue
            if isinstance(answer, str):
                raise HTTPException(500, answer)
            return answer
        tries = self._limits.tries
        raise HTTPException(503, f"The image was given up: it was started {tries} times and never finished.")

    async def end(self) -> None:
        """Refuse new requests from now on, and return when all earlier ones are over."""
        self.ending = True
        while self.waiting or self._making:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)

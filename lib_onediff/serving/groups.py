"""Requests in groups of one size, so that graphs are replayed, each answered once. Knows no Ray."""
from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from fastapi import HTTPException

from ..core.sizes import Size

log = logging.getLogger("onediff")


@dataclass(frozen=True)
class Request:
    """One image. seed: None draws one, so that a second try makes the same image."""

    prompt: str
    negative_prompt: str = ""
    width: int = 1024
    height: int = 1024
    steps: int = 30
    guidance: float = 7.5
    seed: int | None = None
    # A misspelt field is refused.
    __pydantic_config__: ClassVar = {"extra": "forbid"}

    @property
    def shape(self) -> tuple[int, int, bool]:
        """What decides which graph is replayed."""
        return self.width, self.height, self.guidance > 1


@dataclass(frozen=True)
class Limits:
    """waiting: requests that are not begun. group: the most of one size in a row. tries: of one request, where replicas
    end below it."""

    pixels: int = 1536 * 1536
    steps: int = 50
    letters: int = 2000
    guidance: float = 30.0
    waiting: int = 100
    group: int = 4
    tries: int = 3
    __pydantic_config__: ClassVar = {"extra": "forbid"}

    def accept(self, request: Request) -> Request:
        """The request with a seed. Raises HTTPException with a sentence."""
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
                raise HTTPException(422, f"{name}: {value} is not from {least} to {most}.")
        return request if request.seed is not None else replace(request, seed=secrets.randbits(32))


@dataclass(eq=False)
class Ticket:
    request: Request
    answer: asyncio.Future[bytes]
    tries: int = 0


@dataclass
class Groups:
    """make: the images of some requests in their order, a sentence in the place of one that failed; it raises where
    whoever makes them has ended. lanes: how many groups are made at the same time. For one event loop."""

    make: Callable[[list[Request]], AsyncIterator[bytes | str]]
    limits: Limits
    lanes: int
    answered: int = 0
    ending: bool = False
    waiting: list[Ticket] = field(default_factory=list)
    _running: set[asyncio.Task[None]] = field(default_factory=set)

    async def ask(self, request: Request) -> tuple[bytes, Request]:
        """The image, and the request with its seed. Raises HTTPException with a sentence."""
        request = self.limits.accept(request)
        if self.ending:
            raise HTTPException(503, "The service is ending.")
        if len(self.waiting) >= self.limits.waiting:
            raise HTTPException(429, f"{len(self.waiting)} requests wait already; try again later.")
        ticket = Ticket(request, asyncio.get_running_loop().create_future())
        self.waiting.append(ticket)
        if len(self._running) < self.lanes:
            self._running.add(asyncio.create_task(self._lane()))
        return await ticket.answer, request

    async def end(self) -> None:
        """Accept no more, and return when all that wait are answered."""
        self.ending = True
        while self._running:
            await asyncio.wait(self._running)

    def take(self) -> list[Ticket]:
        """The request that has waited the longest, with others of its shape."""
        # Who has hung up has cancelled the answer.
        tickets = [ticket for ticket in self.waiting if not ticket.answer.done()]
        group = [ticket for ticket in tickets if ticket.request.shape == tickets[0].request.shape and not ticket.tries]
        if tickets and tickets[0].tries:
            # It may be what ends replicas, and takes no other with it.
            group = tickets[:1]
        group = group[:self.limits.group]
        self.waiting = [ticket for ticket in tickets if ticket not in group]
        return group

    async def _lane(self) -> None:
        while group := self.take():
            left = iter(group)
            try:
                async for answer in self.make([ticket.request for ticket in group]):
                    self._settle(next(left), answer)
            except Exception:
                log.warning("a group of %d requests was not made to its end", len(group), exc_info=True)
            again = [ticket for ticket in left if not ticket.answer.done()]
            for ticket in again:
                ticket.tries += 1
                if ticket.tries >= self.limits.tries:
                    sentence = f"The image was begun {ticket.tries} times and never finished."
                    self._settle(ticket, HTTPException(503, sentence))
            self.waiting = [ticket for ticket in again if not ticket.answer.done()] + self.waiting
        # At once, so that no request that comes now takes this lane for one that still looks.
        self._running = {lane for lane in self._running if lane is not asyncio.current_task()}

    def _settle(self, ticket: Ticket, answer: bytes | str | HTTPException) -> None:
        if ticket.answer.done():
            return
        self.answered += 1
        if isinstance(answer, bytes):
            ticket.answer.set_result(answer)
        else:
            ticket.answer.set_exception(HTTPException(500, answer) if isinstance(answer, str) else answer)

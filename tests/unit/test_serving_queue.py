"""Serving without Ray: the order of requests, those that are refused, and replicas that die."""
from __future__ import annotations

import asyncio
import functools
import math
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lib_onediff.serving.queue import Limits, Queue, Request


def in_an_event_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine function, by running it in an event loop for at most 600 s."""
    @functools.wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**given), 600))

    return run


def request(seed: int = 1) -> Request:
    return Request("a fox", width=512, height=512, seed=seed)


class Replicas:
    """Stands for the replicas. An image is b"SEED". made: the seeds in the order in which they were begun. ends_at:
    seeds during which a replica dies, and how often. fails_at: seeds that get a sentence in place of an image."""

    def __init__(self, ends_at: dict[int, int] | None = None, fails_at: tuple[int, ...] = ()) -> None:
        self.made: list[int] = []
        self.ends_at = ends_at or {}
        self.fails_at = fails_at
        self.at_once = self.most_at_once = 0
        self.go = asyncio.Event()
        self.go.set()

    async def make(self, wanted: Request) -> bytes | str:
        assert wanted.seed is not None
        self.made.append(wanted.seed)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.go.wait()
            await asyncio.sleep(0)
            if self.ends_at.get(wanted.seed, 0):
                self.ends_at[wanted.seed] -= 1
                raise RuntimeError("the replica has ended")
            return "It failed." if wanted.seed in self.fails_at else str(wanted.seed).encode()
        finally:
            self.at_once -= 1


async def let_tasks_run() -> None:
    """Let every task go as far as it comes without another event; a sleep of some time may be over before that."""
    for _ in range(50):
        await asyncio.sleep(0)


async def answers(queue: Queue, requests: list[Request]) -> list[Any]:
    """For each request its image, or the exception that refused it."""
    results = await asyncio.gather(*map(queue.answer, requests), return_exceptions=True)
    return [answer if isinstance(answer, BaseException) else answer[0] for answer in results]


@in_an_event_loop
async def test_requests_are_begun_in_order_and_each_gets_its_own_image() -> None:
    """There are 200 requests on two replicas. The one that fails gets a sentence with the status 500."""
    replicas = Replicas(fails_at=(7,))
    queue = Queue(replicas.make, Limits(waiting=200), lanes=2)
    got = await answers(queue, [request(seed) for seed in range(200)])
    assert (got[7].status_code, got[7].detail) == (500, "It failed.")
    assert [answer for answer in got if answer is not got[7]] == [b"%d" % seed for seed in range(200) if seed != 7]
    assert replicas.made == list(range(200)) and replicas.most_at_once == 2
    assert (queue.answered, queue.waiting) == (200, 0)


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [
    {"width": 2048, "height": 2048}, {"width": 513}, {"width": 0}, {"height": -512}, {"steps": 51}, {"steps": 0},
    {"guidance": math.nan}, {"guidance": math.inf}, {"guidance": -1.0}, {"seed": -1}, {"seed": 2**32},
    {"negative_prompt": "x" * 2000},
])
@in_an_event_loop
async def test_a_request_outside_the_limits_is_refused_with_a_sentence_and_not_begun(changes: dict[str, Any]) -> None:
    """changes: the fields that are outside the limits; each alone is enough."""
    replicas = Replicas()
    (refusal,) = await answers(Queue(replicas.make, Limits(), lanes=1), [replace(request(), **changes)])
    assert refusal.status_code == 422 and refusal.detail.endswith(".")
    assert replicas.made == []


@in_an_event_loop
async def test_a_full_queue_refuses_a_request_and_a_client_that_disconnects_frees_its_place() -> None:
    """Cancelling a task stands for a client that disconnects: one whose image is being made (request 0), and one that
    waits (request 1)."""
    replicas = Replicas()
    replicas.go.clear()
    queue = Queue(replicas.make, Limits(waiting=3), lanes=1)
    # The first request is in progress and does not wait any more.
    tasks = [asyncio.create_task(queue.answer(request(seed))) for seed in range(4)]
    await let_tasks_run()
    (late,) = await answers(queue, [request(4)])
    assert late.status_code == 429
    tasks[1].cancel()
    tasks[0].cancel()
    await let_tasks_run()
    tasks.append(asyncio.create_task(queue.answer(request(5))))
    replicas.go.set()
    assert [(await task)[0] for task in tasks[2:]] == [b"2", b"3", b"5"] and 1 not in replicas.made


# --- replicas that end ------------------------------------------------------------------------------------------------


@in_an_event_loop
async def test_an_image_is_begun_again_when_its_replica_dies_and_given_up_after_three_tries() -> None:
    """Every replica that begins request 2 dies, and the first one that begins request 3. The other images are made
    once."""
    replicas = Replicas(ends_at={2: 99, 3: 1})
    queue = Queue(replicas.make, Limits(tries=3), lanes=2)
    got = await answers(queue, [request(seed) for seed in range(8)])
    assert got[2].status_code == 503
    assert [answer for answer in got if answer is not got[2]] == [b"%d" % seed for seed in range(8) if seed != 2]
    assert (replicas.made.count(2), replicas.made.count(3), len(replicas.made), queue.answered) == (3, 2, 11, 8)


# --- the end ----------------------------------------------------------------------------------------------------------


@in_an_event_loop
async def test_at_shutdown_waiting_requests_get_their_images_and_new_ones_are_refused() -> None:
    """Queue.end() returns once all are answered; a second call of it returns at once."""
    replicas = Replicas()
    replicas.go.clear()
    queue = Queue(replicas.make, Limits(), lanes=2)
    all_answers = asyncio.create_task(answers(queue, [request(seed) for seed in range(12)]))
    await let_tasks_run()
    ending = asyncio.create_task(queue.end())
    await let_tasks_run()
    (late,) = await answers(queue, [request(99)])
    assert late.status_code == 503 and not ending.done()
    replicas.go.set()
    await ending
    assert await all_answers == [str(seed).encode() for seed in range(12)]
    await queue.end()


def test_serving_imports_no_gradio() -> None:
    """The modules that ray_serve.py imports, Ray apart, can be imported without gradio, which Ray Serve's environment
    lacks."""
    pytest.importorskip("diffusers")
    code = (
        "import sys; sys.modules['gradio'] = None;"
        "import lib_onediff.api.bodies, lib_onediff.api.gate, lib_onediff.hosts.diffusers.model_folder;"
        "import lib_onediff.public, lib_onediff.runtime.runtime, lib_onediff.serving.queue"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

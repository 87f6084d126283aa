"""Serving without Ray: which requests are made together, what is refused, what happens where replicas end."""
from __future__ import annotations

import asyncio
import functools
import math
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lib_onediff.serving.groups import Groups, Limits, Request

SIZES = [(512, 512), (512, 768), (768, 512), (640, 640), (576, 768), (768, 768)]
Images = AsyncIterator["bytes | str"]


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**given), 30))

    return run


def request(seed: int | None = 1, width: int = 512, height: int = 512, **changes: Any) -> Request:
    return Request("a fox", width=width, height=height, seed=seed, **changes)


class Replicas:
    """Makes images: b"SEED". made: each group, as far as it was made. ends_at: seeds below which a replica ends."""

    def __init__(self, ends_at: dict[int, int] | None = None, fails_at: tuple[int, ...] = ()) -> None:
        self.made: list[list[Request]] = []
        self.ends_at, self.fails_at = ends_at or {}, fails_at
        self.at_once = self.most_at_once = 0
        self.go = asyncio.Event()
        self.go.set()

    async def make(self, requests: list[Request]) -> Images:
        group: list[Request] = []
        self.made.append(group)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            for asked in requests:
                await self.go.wait()
                await asyncio.sleep(0)
                assert asked.seed is not None
                if self.ends_at.get(asked.seed, 0):
                    self.ends_at[asked.seed] -= 1
                    raise RuntimeError("the replica has ended")
                group.append(asked)
                yield "It failed." if asked.seed in self.fails_at else str(asked.seed).encode()
        finally:
            self.at_once -= 1


async def answers(groups: Groups, requests: list[Request]) -> list[Any]:
    """Of each its image, or how it was refused."""
    asked = await asyncio.gather(*map(groups.ask, requests), return_exceptions=True)
    return [answer if isinstance(answer, BaseException) else answer[0] for answer in asked]


# --- groups -----------------------------------------------------------------------------------------------------------


@in_a_loop
async def test_every_request_gets_its_own_image_in_groups_of_one_shape() -> None:
    replicas = Replicas()
    groups = Groups(replicas.make, Limits(waiting=200, group=4), lanes=2)
    requests = [request(seed, *SIZES[seed % len(SIZES)]) for seed in range(200)]
    assert await answers(groups, requests) == [str(seed).encode() for seed in range(200)]
    assert sorted(asked.seed or 0 for group in replicas.made for asked in group) == list(range(200))
    assert all(len({asked.shape for asked in group}) == 1 for group in replicas.made)
    assert [len(group) for group in replicas.made].count(4) > 40 and replicas.most_at_once == 2
    assert (groups.answered, groups.waiting) == (200, [])


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [
    {"width": 2048, "height": 2048}, {"width": 513}, {"width": 0}, {"height": -512}, {"steps": 51}, {"steps": 0},
    {"guidance": math.nan}, {"guidance": math.inf}, {"guidance": -1.0}, {"seed": -1}, {"seed": 2**32},
    {"negative_prompt": "x" * 2000},
])
@in_a_loop
async def test_what_is_too_much_is_refused_with_a_sentence(changes: dict[str, Any]) -> None:
    replicas = Replicas()
    (refusal,) = await answers(Groups(replicas.make, Limits(), lanes=1), [replace(request(), **changes)])
    assert refusal.status_code == 422 and refusal.detail.endswith(".")
    assert replicas.made == []


@in_a_loop
async def test_a_full_queue_refuses() -> None:
    replicas = Replicas()
    replicas.go.clear()
    groups = Groups(replicas.make, Limits(waiting=3, group=2), lanes=1)
    asked = [asyncio.create_task(answers(groups, [request(0), request(1)]))]
    await asyncio.sleep(0.01)
    # Those two are being made and wait no longer.
    asked.append(asyncio.create_task(answers(groups, [request(seed) for seed in range(2, 7)])))
    await asyncio.sleep(0.01)
    replicas.go.set()
    first, (*made, late, later) = await asyncio.gather(*asked)
    assert (first, made) == ([b"0", b"1"], [b"2", b"3", b"4"])
    assert (late.status_code, later.status_code) == (429, 429)


# --- replicas that end ------------------------------------------------------------------------------------------------


@in_a_loop
async def test_what_a_replica_leaves_is_made_by_another_and_what_it_has_answered_is_not_made_again() -> None:
    replicas = Replicas(ends_at={3: 1})
    replicas.go.clear()
    groups = Groups(replicas.make, Limits(group=5), lanes=1)
    asked = asyncio.create_task(answers(groups, [request(seed) for seed in range(6)]))
    await asyncio.sleep(0.01)
    replicas.go.set()
    assert await asked == [b"0", b"1", b"2", b"3", b"4", b"5"]
    # Before all others, and alone: one of them may be what has ended the replica.
    assert [[now.seed for now in group] for group in replicas.made] == [[0, 1, 2], [3], [4], [5]]
    assert groups.answered == 6


@in_a_loop
async def test_a_request_below_which_every_replica_ends_is_given_up() -> None:
    replicas = Replicas(ends_at={2: 99})
    groups = Groups(replicas.make, Limits(group=4, tries=3), lanes=2)
    got = await answers(groups, [request(seed) for seed in range(8)])
    assert got[2].status_code == 503
    assert [answer for answer in got if answer is not got[2]] == [b"%d" % seed for seed in range(8) if seed != 2]
    assert replicas.ends_at[2] == 99 - 3 and groups.answered == 8


# --- the end ----------------------------------------------------------------------------------------------------------


@in_a_loop
async def test_the_end_answers_all_that_wait_and_refuses_who_comes_later() -> None:
    replicas = Replicas()
    replicas.go.clear()
    groups = Groups(replicas.make, Limits(), lanes=2)
    asked = asyncio.create_task(answers(groups, [request(seed, *SIZES[seed % 6]) for seed in range(12)]))
    await asyncio.sleep(0.01)
    ending = asyncio.create_task(groups.end())
    await asyncio.sleep(0.01)
    (late,) = await answers(groups, [request(99)])
    assert late.status_code == 503 and not ending.done()
    replicas.go.set()
    await ending
    assert await asked == [str(seed).encode() for seed in range(12)]
    await groups.end()


def test_the_door_and_the_loader_need_no_gradio() -> None:
    """Ray Serve's environment has none."""
    pytest.importorskip("diffusers")
    code = (
        "import sys; sys.modules['gradio'] = None;"
        "import lib_onediff.api.answers, lib_onediff.api.gate, lib_onediff.hosts.diffusers.model_folder"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

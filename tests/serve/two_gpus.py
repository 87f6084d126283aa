"""Images a second of one process and of two behind the grouping of requests, each with its GPU and without Ray:

    python tests/serve/two_gpus.py [requests] [steps]

SD 1.5 of full size with random weights, so prompts are not read; three sizes in turn, as users would send them.
"""
from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from lib_onediff.serving.groups import Groups, Limits, Request

SIZES = ((512, 512), (640, 512), (512, 768))
# Of the small model that stands for it on a CPU.
SMALL_SIZES = ((64, 64), (128, 64), (64, 128))
STATE: dict[str, Any] = {}


def begin(gpus: Any, steps: int, sizes: Sequence[tuple[int, int]]) -> None:
    """Of a replica: take the next GPU, and be warm."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus.get()
    from lib_onediff.bench.images import Drawing
    from lib_onediff.public import compile_pipe
    from lib_onediff.runtime.runtime import runtime

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, dtype = ("sd15", torch.float16) if device.type == "cuda" else ("tiny-sd15", torch.float32)
    drawing = Drawing(model, dtype, device)
    STATE["draw"] = partial(drawing.draw, steps=steps)
    compile_pipe(drawing.pipe)
    with runtime.wait_for_compile():
        for size in sizes:
            for _ in range(3):
                STATE["draw"](size)


def draw(request: Request) -> bytes:
    """The image's values from 0 to 255, without a file's format."""
    return (STATE["draw"]((request.width, request.height)) * 255).byte().cpu().numpy().tobytes()


def warm() -> None:
    """Answered when the replica is."""


async def images_a_second(replicas: int, count: int, steps: int) -> float:
    context, known = multiprocessing.get_context("spawn"), SIZES if torch.cuda.is_available() else SMALL_SIZES
    gpus = context.Queue()
    pools = [ProcessPoolExecutor(1, context, begin, (gpus, steps, known)) for _ in range(replicas)]
    for number in range(replicas):
        gpus.put(str(number))
    loop = asyncio.get_running_loop()
    await asyncio.gather(*(loop.run_in_executor(pool, warm) for pool in pools))
    idle: asyncio.Queue[ProcessPoolExecutor] = asyncio.Queue()
    for pool in pools:
        idle.put_nowait(pool)

    async def make(requests: list[Request]) -> AsyncIterator[bytes | str]:
        pool = await idle.get()
        try:
            for request in requests:
                yield await loop.run_in_executor(pool, draw, request)
        finally:
            idle.put_nowait(pool)

    groups = Groups(make, Limits(waiting=count), replicas)
    sizes = [known[number % len(known)] for number in range(count)]
    began = time.perf_counter()
    answers = await asyncio.gather(*(groups.ask(Request("", width=w, height=h, steps=steps)) for w, h in sizes))
    seconds = time.perf_counter() - began
    if [len(png) for png, _ in answers] != [3 * width * height for width, height in sizes]:
        raise RuntimeError("an answer is of another size than its request")
    for pool in pools:
        pool.shutdown()
    return count / seconds


def main() -> None:
    count, steps = ([int(word) for word in sys.argv[1:]] + [60, 20][len(sys.argv) - 1 :])[:2]
    one, two = (asyncio.run(images_a_second(replicas, count, steps)) for replicas in (1, 2))
    print(f"{count} requests of {steps} steps, three sizes: {one:.2f} images a second by one process, {two:.2f} by two "
          f"({two / one:.2f}x)")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()

"""On a real GPU, the first UNet call of an image at a pre-warmed size replays a CUDA graph."""
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("diffusers")

from gpu_calls import arguments, last_call

from lib_onediff.bench.models import random_unet
from lib_onediff.core.jobs import JobQueue
from lib_onediff.core.settings import Settings
from lib_onediff.core.sizes import Size
from lib_onediff.hosts.diffusers.unet import attach, detach
from lib_onediff.prewarm.worker import CAPTURING, CHECKING, WarmUp
from lib_onediff.runtime.runtime import runtime
from lib_onediff.store.history import History

pytestmark = pytest.mark.gpu
SIZES = [Size(512, 512), Size(768, 512), Size(512, 768, 2)]
SECONDS = 300


class Host:
    """A host with one UNet. seen: the activities (Job.what) of the running pre-warm job, noted at each call of
    warm()."""

    def __init__(self, unet: nn.Module) -> None:
        self.unet = unet
        self.lock = threading.Lock()
        self.queue = WarmUp(self, runtime, JobQueue())
        self.seen = set[str]()
        attach(unet)

    def warm(self, width: int, height: int, batch: int, tokens: int) -> None:
        self.seen |= {job.what for job in self.queue.jobs() if job.state == "running"}
        with torch.no_grad():
            self.unet(**arguments(self.unet, width, height, batch, tokens))

    def call_shapes(self, pictures: int, tokens: int) -> tuple[tuple[int, int], ...]:
        return (2 * pictures, tokens), (pictures, tokens)

    def model_name(self) -> str | None:
        return runtime.model_name(self.unet)

    def exclusively(self, work: Callable[[], Any]) -> Any:
        with self.lock:
            return work()


@pytest.fixture
def host() -> Iterator[Host]:
    runtime.purge()
    host = Host(random_unet("sd15", torch.device("cuda")).half())
    yield host
    detach(host.unet)
    runtime.services.history = History()
    runtime.configure(Settings())
    runtime.purge()


def test_the_first_call_of_a_pre_warmed_size_replays_a_graph(host: Host) -> None:
    """With prompt and negative prompt in one call, and in two. The calls come from another thread than the worker that
    has captured the graphs. While a job runs, it shows that it checks the output, and that it captures a graph."""
    jobs = host.queue.add(SIZES, "panel")
    deadline = time.monotonic() + SECONDS
    while any(job.pending for job in host.queue.jobs()):
        assert time.monotonic() < deadline, host.queue.jobs()
        time.sleep(0.01)
    assert [(job.state, job.share, job.reason) for job in host.queue.jobs()] == [("done", 1.0, "")] * len(jobs)
    assert {CHECKING, CAPTURING} <= host.seen
    # Images come from other threads than the worker that has captured the graphs.
    for size in SIZES:
        for latents in (2 * size.batch, size.batch):
            before = runtime.call_stats.calls["graph"]
            host.warm(size.width, size.height, latents, 77)
            assert runtime.call_stats.calls["graph"] == before + 1, last_call()

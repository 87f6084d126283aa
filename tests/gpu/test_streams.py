"""Threads that each use a CUDA stream of their own replay graphs, whose inputs are in memory that all calls share."""
from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from exact_operators import relative_error
from torch import nn

pytest.importorskip("diffusers")

from gpu_calls import host, last_call

from lib_onediff.bench.models import inputs, random_unet
from lib_onediff.hosts.diffusers.unet import attach
from lib_onediff.runtime.runtime import runtime

pytestmark = pytest.mark.gpu
CLOSE = 1e-2
CALLS = 40
SECONDS = 120


@pytest.fixture
def unets() -> Iterator[list[nn.Module]]:
    runtime.purge()
    made = [random_unet("sd15", torch.device("cuda")).half() for _ in range(2)]
    for unet in made:
        attach(unet)
    yield made
    runtime.release_all()
    runtime.purge()


@pytest.mark.parametrize("shared", [True, False], ids=["one UNet", "two UNets"])
def test_two_threads_on_separate_streams_get_the_outputs_of_their_own_inputs(
    unets: list[nn.Module], shared: bool
) -> None:
    """Both threads make forty calls at the same time, which replay graphs. shared: whether both call the same UNet. The
    threads' inputs differ, and calls copy them to the same addresses: without an order between the streams, a replay
    would read those of the other thread."""
    users = [unets[0], unets[0] if shared else unets[1]]
    torch.manual_seed(3)
    given = [inputs(unet, 512, 512, 2, 77, torch.float16) for unet in users]
    given[1] = {name: torch.randn_like(value) if name != "timestep" else value for name, value in given[1].items()}
    expected = [host(unet, one) for unet, one in zip(users, given, strict=True)]
    assert relative_error(expected[0], expected[1]) > 0.1
    with torch.no_grad():
        for unet, one in zip(users, given, strict=True):
            for _ in range(3):
                unet(**one)
    assert last_call()["route"] == "graph"
    torch.cuda.synchronize()
    errors: list[list[float]] = [[], []]
    start = threading.Barrier(2)

    def work(index: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad(), runtime.warming_up():
            start.wait(SECONDS)
            outputs = [users[index](**given[index], return_dict=False)[0] for _ in range(CALLS)]
            stream.synchronize()
            errors[index] = [relative_error(output, expected[index]) for output in outputs]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert [len(each) for each in errors] == [CALLS, CALLS]
    assert max(max(each) for each in errors) < CLOSE

"""A GPU whose memory is full: what OneDiff frees before a sampling and around a graph's capture, and what happens when
the host or OneDiff runs out of memory. Also the measured peak of memory in use.

The GPU, its graphs and its memory are pretended. A shape's state is "ready" with a graph and "proved" without.
"""
from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import a_call, diffusers_output, generating, served
from graph_builders import PretendedCard, PretendedGraphs
from ladder_builders import StandInOperators, attached, error, make_ready, reason, served_by, states
from torch import Tensor, nn

from lib_onediff.core.attempt import OUT_OF_MEMORY
from lib_onediff.core.guard import Guard
from lib_onediff.core.settings import Settings
from lib_onediff.devices.cuda.graphs.capture import PIECE, most_in_use
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.runtime.full_gpu import NO_ROOM_YET
from lib_onediff.runtime.graphs import cache
from lib_onediff.runtime.graphs.cache import CARD_IS_FULL, GRAPHS, WEIGHTS, MemoryPressure
from lib_onediff.runtime.runtime import HOST_NEEDS, runtime

CLOSE = 1e-5
GIBIBYTE = 2**30
CPU = torch.device("cpu")


@pytest.fixture
def card(pretended: PretendedGraphs) -> PretendedCard:
    """A pretended GPU of 24 GiB, whose memory a test may fill."""
    pretended.card.size = 24 * GIBIBYTE
    return pretended.card


def leave(card: PretendedCard, left: int) -> None:
    """Have other programs use all GPU memory except for this many bytes."""
    card.others += card.free(torch.device("cpu")) - left


def fill_after(card: PretendedCard, size: int) -> None:
    """Have other programs use so much GPU memory that OneDiff must free `size` bytes for the host."""
    leave(card, card.spare(torch.device("cpu")) - size)


def test_a_sampling_on_a_full_gpu_frees_graphs_until_the_host_has_memory_pinned_ones_last(
    unet: nn.Module, card: PretendedCard
) -> None:
    """begin_sampling() frees memory for the host, and nothing if there is enough. 72x72 is pinned. Each fill_after()
    leaves 32 MiB too little."""
    make_ready(unet, (16, 16), (8, 8))
    pinned = attached()
    make_ready(pinned, (9, 9))
    runtime.pin("72x72", runtime.rows()[0].model, True)
    emptied = card.emptied
    runtime.begin_sampling(unet)
    assert set(states().values()) == {"ready"} and card.emptied == emptied, "with enough memory nothing is freed"
    fill_after(card, 32 << 20)
    runtime.begin_sampling(unet)
    assert states() == {"72x72": "ready", "64x64": "proved", "128x128": "proved"}
    fill_after(card, 32 << 20)
    runtime.begin_sampling(unet)
    assert set(states().values()) == {"proved"} and runtime.services.holdings.shared() == 0


def test_on_a_full_gpu_no_graph_is_captured_until_memory_is_free(unet: nn.Module, card: PretendedCard) -> None:
    """Only 64 MiB are free, less than OneDiff leaves to the host. Calls are served without a graph, for the reason that
    the GPU is full, until other programs free memory."""
    served(unet, a_call(unet))
    leave(card, 64 << 20)
    for _ in range(3):
        assert error(unet, a_call(unet)) < CLOSE
        assert served_by() == ("native", "plain")
    assert reason() == CARD_IS_FULL and runtime.rows()[0].reason == CARD_IS_FULL
    card.others = 0
    for route in ("plain", "graph"):
        assert error(unet, a_call(unet)) < CLOSE
        assert served_by() == ("native", route)
    assert runtime.rows()[0].reason == ""


def test_a_forward_of_the_host_that_runs_out_of_memory_runs_again_after_our_graphs_are_freed(
    unet: nn.Module, native_operators: StandInOperators, card: PretendedCard
) -> None:
    """OneDiff does not serve the call. attempts: the states of shapes at each run of the host's forward, which raises
    as long as there are graphs. The output is that of the second run."""
    make_ready(unet, (8, 8))
    call = a_call(unet, seed=3)
    attempts = []
    served(unet, call)

    def host() -> Tensor:
        attempts.append(states())
        if runtime.services.holdings.made.devices():
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return diffusers_output(unet, call)

    with torch.no_grad():
        # OneDiff serves no latent with three channels: the host computes the call.
        output = runtime.run(unet, UNetCall(call.latent[:, :3], call.timestep, call.context, call.y), host)
    assert torch.equal(output, diffusers_output(unet, call))
    assert attempts == [{"64x64": "ready"}, {"64x64": "proved"}]


@pytest.mark.parametrize("has_graphs", [False, True])
def test_a_forward_of_the_host_that_runs_out_of_memory_runs_again_after_the_host_moves_weights(
    has_graphs: bool, unet: nn.Module, native_operators: StandInOperators, card: PretendedCard,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """HostTraits.make_room asks the host to move weights to main memory, and returns whether it did: if not, and
    without graphs to free, the host's exception is raised. has_graphs: whether OneDiff has graphs to free first. The
    warning names what was freed: graphs, weights or both."""
    call = a_call(unet, seed=3)
    asked = list[int]()
    if has_graphs:
        make_ready(unet, (8, 8))
    served(unet, call)
    network = runtime.services.networks.get(unet)
    assert network is not None

    def host() -> Tensor:
        if not asked:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return diffusers_output(unet, call)

    traits = network.bound.host_traits
    network.bound.host_traits = replace(traits, make_room=lambda unet, size: not asked.append(size))
    with torch.no_grad():
        output = runtime.run(unet, UNetCall(call.latent[:, :3], call.timestep, call.context, call.y), host)
    assert torch.equal(output, diffusers_output(unet, call)) and asked == [HOST_NEEDS]
    [warning] = [line for line in caplog.messages if "is computed again" in line]
    assert (GRAPHS in warning, WEIGHTS in warning) == (has_graphs, True)
    network.bound.host_traits = replace(traits, make_room=lambda unet, size: False)
    asked.clear()
    runtime.release_memory()
    with torch.no_grad(), pytest.raises(torch.cuda.OutOfMemoryError):
        runtime.run(unet, UNetCall(call.latent[:, :3], call.timestep, call.context, call.y), host)


def test_a_call_of_ours_that_runs_out_of_memory_is_not_tried_again_in_this_sampling(
    unet: nn.Module, native_operators: StandInOperators, card: PretendedCard
) -> None:
    """The host computes it until the sampling ends. Each try would free the graphs of all other shapes. In the next
    sampling, OneDiff tries again."""

    def too_large(tokens: Tensor, unit: Any, consumer: Any) -> Tensor:
        if len(tokens) > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return torch_ops.gated(tokens, unit, consumer)

    native_operators.gated_by = too_large
    large = a_call(unet, batch=4)
    leave(card, 2 * GIBIBYTE)
    for _ in range(2):
        runtime.begin_sampling(unet)
        before = native_operators.calls
        assert error(unet, large) < CLOSE and served_by()[1] == "host" and reason() == OUT_OF_MEMORY
        assert native_operators.calls == before + 1
        make_ready(unet, (8, 8))
        before = native_operators.calls, card.emptied
        for _ in range(3):
            assert error(unet, large) < CLOSE and served_by()[1] == "host" and reason() == NO_ROOM_YET
        assert (native_operators.calls, card.emptied) == before and states()["64x64"] == "ready"
        runtime.purge()
    native_operators.recover()
    assert error(unet, large) < CLOSE and served_by()[1] == "host", "the sampling has not ended"
    runtime.begin_sampling(unet)
    assert error(unet, large) < CLOSE and served_by() == ("native", "plain")


def test_a_call_of_ours_that_ran_out_of_memory_is_tried_again_when_much_more_is_free(
    unet: nn.Module, native_operators: StandInOperators, card: PretendedCard
) -> None:
    """All calls are in one sampling. freed: MiB that become free before each call. is_tried: whether our forward runs
    before the host computes the call; 10 MiB more than at the last failure are too few, 100 MiB are enough."""
    call = a_call(unet)
    leave(card, 100 << 20)
    native_operators.fail_with(torch.cuda.OutOfMemoryError("CUDA out of memory"))
    runtime.begin_sampling(unet)
    for freed, is_tried in ((0, True), (0, False), (10, False), (100, True), (0, False)):
        leave(card, card.free(CPU) + (freed << 20))
        before = native_operators.calls
        assert error(unet, call) < CLOSE and served_by()[1] == "host"
        assert native_operators.calls == before + is_tried
    native_operators.recover()
    leave(card, card.free(CPU) + (100 << 20))
    assert error(unet, call) < CLOSE and served_by() == ("native", "plain")


def test_a_call_of_ours_that_ran_out_of_memory_is_tried_once_more_if_graphs_were_freed(
    unet: nn.Module, native_operators: StandInOperators, card: PretendedCard
) -> None:
    """The first failure frees the graphs of another size, so that the second call of ours may succeed. If it fails too,
    the host computes the later calls (is_tried: whether our forward runs first)."""
    make_ready(unet, (16, 16))
    call = a_call(unet)
    leave(card, GIBIBYTE)
    runtime.begin_sampling(unet)
    native_operators.fail_with(torch.cuda.OutOfMemoryError("CUDA out of memory"))
    assert error(unet, call) < CLOSE and served_by()[1] == "host"
    native_operators.recover()
    for route in ("plain", "plain", "graph", "graph"):
        assert error(unet, call) < CLOSE and served_by() == ("native", route), reason()
    runtime.release_memory()
    make_ready(unet, (12, 12))
    native_operators.fail_with(torch.cuda.OutOfMemoryError("CUDA out of memory"))
    for is_tried in (True, True, False, False):
        before = native_operators.calls
        assert error(unet, call) < CLOSE and served_by()[1] == "host"
        assert native_operators.calls == before + is_tried


def test_a_capture_that_runs_out_of_memory_frees_the_other_graphs(unet: nn.Module, card: PretendedCard) -> None:
    """The call is served without a graph, and its output is close to the host's. The capture's need is known and was
    free when it began; another program allocates it meanwhile."""
    make_ready(unet, (8, 8))
    for _ in range(2):
        served(unet, a_call(unet, 8, 10))
    needs = {row.resolution: row.needs for row in runtime.rows()}["80x64"]
    runtime.purge(["80x64"])
    served(unet, a_call(unet, 8, 10))
    # Another program allocates the memory during the capture.
    runtime.services.holdings.made.before_capture = lambda inputs: leave(card, needs // 8 - (1 << 20))
    runtime.services.graphs.free()
    assert error(unet, a_call(unet, 8, 10)) < CLOSE
    assert served_by() == ("native", "plain")
    assert states() == {"80x64": "proved", "64x64": "proved"} and runtime.services.holdings.shared() == 0
    assert "VRAM ran out while the CUDA graph of this size was captured" in runtime.rows()[0].reason


def test_the_thread_that_watches_gpu_memory_frees_nothing_while_the_host_makes_an_image(
    unet: nn.Module, card: PretendedCard
) -> None:
    """The graphs cannot be replayed any more, because the weights have moved, and the thread would free them. But an
    extension may capture a graph at that moment, which freeing memory would break. After the image they are freed."""
    make_ready(unet, (8, 8))
    for parameter in unet.parameters():
        parameter.data = parameter.data.clone()
    emptied = card.emptied
    with generating(runtime, Settings()):
        runtime.pressure._note_lost()
        assert card.emptied == emptied and runtime.services.networks.get(unet).runners
    runtime.pressure._note_lost()
    assert card.emptied > emptied and not runtime.services.networks.get(unet).runners


def test_the_peak_of_memory_in_use_is_counted_in_blocks_as_torch_allocates_them() -> None:
    """most_in_use() reads the events of torch's memory snapshot. Sizes are rounded up to PIECE, and only memory that is
    allocated in these events counts."""

    def events(*sizes: tuple[int, int]) -> list[dict[str, Any]]:
        """The events of a snapshot for each (address, bytes): an allocation, or for 0 bytes the release."""
        return [
            {"action": name, "addr": address, "size": size} for address, size in sizes
            for name in (("alloc",) if size else ("free_requested", "free_completed"))
        ]

    assert most_in_use([]) == 0
    # Memory that was allocated before does not count when it is freed.
    in_turn = events((7, 0), (1, 4 * PIECE), (2, PIECE), (1, 0), (1, 3 * PIECE), (2, 0), (1, 0))
    assert most_in_use([*in_turn, {"action": "segment_alloc", "addr": 1, "size": 10 * PIECE}]) == 5 * PIECE
    assert most_in_use(events((1, 1), (2, PIECE + 1))) == 3 * PIECE, "sizes are rounded up"


def test_images_that_end_at_the_same_time_start_one_thread_that_watches_gpu_memory(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight threads call MemoryPressure.watch() while making a thread takes 50 ms. In an earlier version, a second
    watching thread was made meanwhile."""
    made: list[threading.Thread] = []

    class SlowThread(threading.Thread):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            made.append(self)
            time.sleep(0.05)

    over = threading.Event()
    holdings: Any = SimpleNamespace(made=SimpleNamespace(devices=lambda: not over.is_set()))
    pressure = MemoryPressure(holdings, SimpleNamespace(), threading.RLock(), Guard(), lambda: True)
    monkeypatch.setattr(cache, "SECONDS_BETWEEN_LOOKS", 0.01)
    # In the watcher's module only: the pool and other tests' workers start threads too.
    monkeypatch.setattr(cache, "threading", SimpleNamespace(Thread=SlowThread))
    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(pressure.watch) for _ in range(8)]:
            done.result()
    over.set()
    for thread in made:
        thread.join(10)
    assert len(made) == 1

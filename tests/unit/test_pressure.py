"""Room on the GPU before a sampling and around a capture, and the measured peak of memory."""
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
    """Let other programs fill the card except for this many bytes."""
    card.others += card.free(torch.device("cpu")) - left


def fill_after(card: PretendedCard, size: int) -> None:
    """Let other programs fill the card so far that dropping this would leave enough."""
    leave(card, card.spare(torch.device("cpu")) - size)


def test_a_sampling_on_a_full_gpu_drops_graphs_until_there_is_room_and_pinned_ones_last(
    unet: nn.Module, card: PretendedCard
) -> None:
    """begin_sampling() makes room for the host. fill_after(card, n): n bytes more must become free. With enough room
    nothing is dropped."""
    make_ready(unet, (16, 16), (8, 8))
    pinned = attached()
    make_ready(pinned, (9, 9))
    runtime.pin("72x72", runtime.rows()[0].model, True)
    emptied = card.emptied
    runtime.begin_sampling(unet)
    assert set(states().values()) == {"ready"} and card.emptied == emptied, "room enough costs nothing"
    fill_after(card, 32 << 20)
    runtime.begin_sampling(unet)
    assert states() == {"72x72": "ready", "64x64": "proved", "128x128": "proved"}
    fill_after(card, 32 << 20)
    runtime.begin_sampling(unet)
    assert set(states().values()) == {"proved"} and runtime.services.holdings.shared() == 0


def test_on_a_full_gpu_no_graph_is_captured_until_there_is_room(unet: nn.Module, card: PretendedCard) -> None:
    """Only 64 MiB are free, less than is left for the host. The reason says so until other programs free memory."""
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


def test_a_host_that_runs_out_of_memory_is_run_again_after_our_graphs_are_dropped(
    unet: nn.Module, native_operators: StandInOperators, card: PretendedCard
) -> None:
    """attempts: the states of shapes at each run of the host, which raises as long as there are graphs."""
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
        # With three channels the call is none of ours, and the host computes it.
        output = runtime.run(unet, UNetCall(call.latent[:, :3], call.timestep, call.context, call.y), host)
    assert torch.equal(output, diffusers_output(unet, call))
    assert attempts == [{"64x64": "ready"}, {"64x64": "proved"}]


@pytest.mark.parametrize("has_graphs", [False, True])
def test_a_host_that_runs_out_of_memory_is_run_again_after_it_has_moved_weights(
    has_graphs: bool, unet: nn.Module, native_operators: StandInOperators, card: PretendedCard,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """make_room lets the host move weights to main memory, and returns whether it did: if not, its exception is raised.
    The warning names what was freed."""
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
    [warning] = [line for line in caplog.messages if "computes this step again" in line]
    assert (GRAPHS in warning, WEIGHTS in warning) == (has_graphs, True)
    network.bound.host_traits = replace(traits, make_room=lambda unet, size: False)
    asked.clear()
    runtime.release_memory()
    with torch.no_grad(), pytest.raises(torch.cuda.OutOfMemoryError):
        runtime.run(unet, UNetCall(call.latent[:, :3], call.timestep, call.context, call.y), host)


def test_a_call_that_runs_out_of_memory_is_not_tried_again_in_this_sampling(
    unet: nn.Module, native_operators: StandInOperators, card: PretendedCard
) -> None:
    """It would free the graphs of all other shapes each time."""

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


def test_a_call_that_ran_out_of_memory_is_tried_again_when_more_is_free(
    unet: nn.Module, native_operators: StandInOperators, card: PretendedCard
) -> None:
    """freed: MiB that become free before each call. Ours is tried again only if much more is free than when it
    failed."""
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


def test_a_call_is_tried_once_more_if_graphs_had_the_memory(
    unet: nn.Module, native_operators: StandInOperators, card: PretendedCard
) -> None:
    """The first failure frees the graphs of another size, so that the next call may succeed; after a second failure it
    is left to the host."""
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


def test_out_of_memory_in_a_capture_frees_the_other_graphs(unet: nn.Module, card: PretendedCard) -> None:
    """The call's output is not lost. What the capture would have needed was known, and free when it began."""
    make_ready(unet, (8, 8))
    for _ in range(2):
        served(unet, a_call(unet, 8, 10))
    needs = {row.resolution: row.needs for row in runtime.rows()}["80x64"]
    runtime.purge(["80x64"])
    served(unet, a_call(unet, 8, 10))
    # Others allocate it during the capture, which could not be known before.
    runtime.services.holdings.made.before_capture = lambda inputs: leave(card, needs // 8 - (1 << 20))
    runtime.services.graphs.free()
    assert error(unet, a_call(unet, 8, 10)) < CLOSE
    assert served_by() == ("native", "plain")
    assert states() == {"80x64": "proved", "64x64": "proved"} and runtime.services.holdings.shared() == 0
    assert "out of GPU memory while its graph was captured" in runtime.rows()[0].reason


def test_the_watching_thread_frees_nothing_while_the_host_makes_an_image(
    unet: nn.Module, card: PretendedCard
) -> None:
    """Its graphs are lost, because the weights have moved. An extension may be capturing a graph at that moment, which
    freeing would break. The next sampling looks itself."""
    make_ready(unet, (8, 8))
    for parameter in unet.parameters():
        parameter.data = parameter.data.clone()
    emptied = card.emptied
    with generating(runtime, Settings()):
        runtime.pressure._note_lost()
        assert card.emptied == emptied and runtime.services.networks.get(unet).runners
    runtime.pressure._note_lost()
    assert card.emptied > emptied and not runtime.services.networks.get(unet).runners


def test_the_most_memory_in_use_is_counted_in_torchs_pieces() -> None:
    """most_in_use reads the events of torch's memory snapshot."""

    def events(*sizes: tuple[int, int]) -> list[dict[str, Any]]:
        """(address, bytes); no bytes: the memory is freed."""
        return [
            {"action": name, "addr": address, "size": size} for address, size in sizes
            for name in (("alloc",) if size else ("free_requested", "free_completed"))
        ]

    assert most_in_use([]) == 0
    # Memory that was allocated before does not count when it is freed.
    in_turn = events((7, 0), (1, 4 * PIECE), (2, PIECE), (1, 0), (1, 3 * PIECE), (2, 0), (1, 0))
    assert most_in_use([*in_turn, {"action": "segment_alloc", "addr": 1, "size": 10 * PIECE}]) == 5 * PIECE
    assert most_in_use(events((1, 1), (2, PIECE + 1))) == 3 * PIECE, "in the pieces that torch hands out"


def test_images_that_end_at_the_same_time_start_one_watching_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an earlier version, a second thread started another one while the first was being made."""
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

"""Room on the GPU before a sampling and around a capture, and the most memory that a capture has in use at a time."""
from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import a_call, diffusers_output, served
from graph_builders import PretendedCard, PretendedGraphs
from ladder_builders import Weather, attached, error, now, reason
from torch import Tensor, nn

from lib_onediff.core.call import UNetCall
from lib_onediff.devices.cuda.graphs.allocations import PIECE, most_in_use
from lib_onediff.devices.cuda.graphs.device_memory import LEAST, MOST, Card
from lib_onediff.options.settings import Settings
from lib_onediff.runtime.freed_memory import give_back_freed_memory
from lib_onediff.runtime.graphs import memory_pressure as pressure
from lib_onediff.runtime.graphs.cache import CARD_IS_FULL
from lib_onediff.runtime.runtime import runtime

CLOSE = 1e-5
GIBIBYTE = 2**30


@pytest.fixture
def card(pretended: PretendedGraphs) -> PretendedCard:
    pretended.card.size = 24 * GIBIBYTE
    return pretended.card


def make_ready(unet: nn.Module, *sizes: tuple[int, int]) -> None:
    for height, width in sizes:
        for route in ("plain", "plain", "graph"):
            assert error(unet, a_call(unet, height, width)) < CLOSE
            assert now() == ("native", route), reason()


def states() -> dict[str, str]:
    return {row.resolution: row.state for row in runtime.rows()}


def leave(card: PretendedCard, left: int) -> None:
    """Let others fill the card but for so many bytes."""
    card.others += card.free(torch.device("cpu")) - left


def fill_after(card: PretendedCard, size: int) -> None:
    """Let others take so much that what is left would be enough if this were given back."""
    leave(card, card.spare(torch.device("cpu")) - size)


def test_room_enough_costs_nothing(unet: nn.Module, card: PretendedCard) -> None:
    make_ready(unet, (8, 8))
    emptied = card.emptied
    runtime.pressure.before_sampling("another architecture", 0)
    runtime.pressure.before_decode(torch.empty(1, 4, 8, 8))
    assert states() == {"64x64": "ready"} and card.emptied == emptied


def test_other_architectures_go_first(unet: nn.Module, card: PretendedCard) -> None:
    other = attached()
    make_ready(other, (8, 16))
    make_ready(unet, (8, 8))
    fill_after(card, 32 << 20)
    runtime.begin_sampling(unet)
    assert states() == {"64x64": "ready", "128x64": "proved"}
    runtime.begin_sampling(unet)
    assert states() == {"64x64": "ready", "128x64": "proved"}, "that was enough"


def test_the_pinned_go_last(unet: nn.Module, card: PretendedCard) -> None:
    make_ready(unet, (16, 16), (8, 8))
    runtime.pin("64x64", runtime.rows()[0].model, True)
    shared = runtime.services.graphs.shared()
    fill_after(card, 32 << 20)
    runtime.begin_sampling(unet)
    assert states() == {"64x64": "ready", "128x128": "proved"}
    assert runtime.services.graphs.shared() < 0.6 * shared, "the pinned one was captured again in less"
    fill_after(card, 32 << 20)
    runtime.begin_sampling(unet)
    assert set(states().values()) == {"proved"} and runtime.services.graphs.shared() == 0


def test_a_decode_needs_more_than_a_sampling(unet: nn.Module, card: PretendedCard) -> None:
    make_ready(unet, (8, 8))
    leave(card, 2 * card.spare(torch.device("cpu")))
    runtime.begin_sampling(unet)
    runtime.pressure.before_decode(torch.empty(1, 4, 32, 32))
    assert states() == {"64x64": "ready"}
    runtime.pressure.before_decode(torch.empty(1, 4, 128, 128))
    assert states() == {"64x64": "proved"}


def test_on_a_full_card_graphs_wait_until_there_is_room(unet: nn.Module, card: PretendedCard) -> None:
    served(unet, a_call(unet))
    leave(card, 64 << 20)
    for _ in range(3):
        assert error(unet, a_call(unet)) < CLOSE
        assert now() == ("native", "plain")
    assert reason() == CARD_IS_FULL and runtime.rows()[0].reason == CARD_IS_FULL
    card.others = 0
    for route in ("plain", "graph"):
        assert error(unet, a_call(unet)) < CLOSE
        assert now() == ("native", route)
    assert runtime.rows()[0].reason == ""


def test_other_architectures_make_room_for_a_graph(unet: nn.Module, card: PretendedCard) -> None:
    other = attached()
    make_ready(other, (12, 12))
    for _ in range(2):
        served(unet, a_call(unet))
    needs = runtime.rows()[0].needs
    runtime.purge(["64x64"])
    leave(card, needs // 2 + card.spare(torch.device("cpu")))
    make_ready(unet, (8, 8))
    assert states() == {"64x64": "ready", "96x96": "proved"}


def test_a_host_that_runs_out_of_memory_is_run_once_more(
    unet: nn.Module, weather: Weather, card: PretendedCard
) -> None:
    make_ready(unet, (8, 8))
    call, attempts = a_call(unet, seed=3), []
    served(unet, call)

    def host() -> Tensor:
        attempts.append(states())
        if runtime.services.graphs.devices():
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return diffusers_output(unet, call)

    with torch.no_grad():
        # Gradients are not ours, so the host serves it.
        output = runtime.run(unet, UNetCall(call.latent[:, :3], call.timestep, call.context, call.y), host)
    assert torch.equal(output, diffusers_output(unet, call))
    assert attempts == [{"64x64": "ready"}, {"64x64": "proved"}]


def test_a_host_that_runs_out_without_us_gets_its_own_error(card: PretendedCard) -> None:
    attempts = []

    def host() -> None:
        attempts.append(True)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory: tried to allocate")

    with pytest.raises(torch.cuda.OutOfMemoryError, match="tried to allocate"):
        runtime.pressure.run_host(host)
    assert len(attempts) == 1


def test_out_of_memory_in_a_capture_frees_the_others(unet: nn.Module, card: PretendedCard) -> None:
    make_ready(unet, (8, 8))
    for _ in range(2):
        served(unet, a_call(unet, 8, 10))
    needs = {row.resolution: row.needs for row in runtime.rows()}["80x64"]
    runtime.purge(["80x64"])
    served(unet, a_call(unet, 8, 10))
    # Others take it while the graph is captured: nobody could see that before.
    runtime.services.graphs._graphs.before_capture = lambda inputs: leave(card, needs // 8 - (1 << 20))
    runtime.services.graphs.free()
    assert error(unet, a_call(unet, 8, 10)) < CLOSE
    assert now() == ("native", "plain")
    assert states() == {"80x64": "proved", "64x64": "proved"} and runtime.services.graphs.shared() == 0
    assert "out of GPU memory while its graph was captured" in runtime.rows()[0].reason


def test_what_is_spared() -> None:
    card = Card()
    assert card.spare(torch.device("cpu")) == LEAST
    sizes = {2: LEAST, 16: GIBIBYTE // 2, 141: MOST}
    for total, spare in sizes.items():
        assert PretendedCard(PretendedGraphs(), total * GIBIBYTE).spare(torch.device("cpu")) == spare


def test_a_unet_that_its_host_takes_away_between_pictures_is_noticed(
    unet: nn.Module, card: PretendedCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pressure, "SECONDS_BETWEEN_LOOKS", 0.01)
    make_ready(unet, (8, 8))
    emptied = card.emptied
    runtime.keep_history()
    watcher = runtime.pressure._watcher
    time.sleep(0.1)
    assert watcher.is_alive() and runtime.services.graphs.devices() and card.emptied == emptied, "nothing has happened"
    for parameter in unet.parameters():
        parameter.data = parameter.data.clone()
    watcher.join(30)
    assert not watcher.is_alive() and not runtime.services.graphs.devices() and card.emptied > emptied
    assert states() == {"64x64": "proved"}


def test_nothing_is_given_back_by_a_thread_of_its_own_while_the_host_makes_an_image(
    unet: nn.Module, card: PretendedCard
) -> None:
    """An extension may be capturing a graph just now; the next sampling looks by itself."""
    make_ready(unet, (8, 8))
    for parameter in unet.parameters():
        parameter.data = parameter.data.clone()
    p = SimpleNamespace()
    runtime.generations.begin(p, Settings())
    emptied = card.emptied
    runtime.pressure._note_lost()
    assert card.emptied == emptied and runtime.managed_unet(unet).ready_keys()
    runtime.generations.end(p)
    runtime.pressure._note_lost()
    assert card.emptied > emptied and not runtime.managed_unet(unet).ready_keys()


def test_a_card_whose_cache_cannot_be_emptied_now(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", refuse)
    Card().empty_cache()


def alloc(address: int, size: int) -> dict[str, Any]:
    return {"action": "alloc", "addr": address, "size": size}


def free(address: int) -> list[dict[str, Any]]:
    return [{"action": name, "addr": address, "size": 0} for name in ("free_requested", "free_completed")]


def test_the_most_at_a_time_and_not_the_sum() -> None:
    events = [alloc(1, 4 * PIECE), alloc(2, PIECE), *free(1), alloc(1, 3 * PIECE), *free(2), *free(1)]
    assert most_in_use(events) == 5 * PIECE


def test_what_was_there_before_does_not_count_when_it_is_freed() -> None:
    assert most_in_use([*free(7), alloc(1, PIECE), *free(8)]) == PIECE


def test_in_the_pieces_that_torch_hands_out() -> None:
    assert most_in_use([alloc(1, 1), alloc(2, PIECE + 1)]) == 3 * PIECE


def test_other_events_are_nothing() -> None:
    assert most_in_use([{"action": "segment_alloc", "addr": 1, "size": 10 * PIECE}, alloc(1, PIECE)]) == PIECE
    assert most_in_use([]) == 0


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc_trim")
def test_freed_blocks_between_others_go_back() -> None:
    blocks = [torch.ones(16 * 1024) for _ in range(4096)]  # 64 KiB each: below what glibc maps one by one
    kept = blocks[::16]
    del blocks
    before = resident_bytes()
    if not give_back_freed_memory():
        pytest.skip("this C library gives nothing back")
    assert before - resident_bytes() > 50 * 2**20
    assert all(float(block[0]) == 1.0 for block in kept)

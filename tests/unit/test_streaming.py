"""Streaming: weights that the WebUI keeps in main memory are copied to the GPU while a forward runs. Each copy must be
finished when the weight is read, and must not be stale.

A schedule copies groups of layers (units) through a ring, a small buffer on the GPU. Here, both memories are the CPU's,
and two_memories decides by name which parameters count as being in main memory.
copy_stream: a stand-in that makes each copy as early, or as late, as the schedule's marks (events) allow.
"""
from __future__ import annotations

import copy
import gc
import random
import weakref
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import SMALL_XL, a_call, diffusers_output, diffusers_unet, relative_error, served
from graph_builders import PretendedGraphs
from ladder_builders import StandInOperators, reason, served_by
from streaming_builders import EarlyCopyStream, LateCopyStream, use_copy_stream
from torch import Tensor, nn

import lib_onediff
from lib_onediff.core.attempt import OUT_OF_MEMORY
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.runtime import card_route
from lib_onediff.runtime.full_gpu import NO_ROOM_YET, WEIGHTS_MOVED
from lib_onediff.runtime.graphs import cache as graph_cache
from lib_onediff.runtime.graphs.accounting import memory_of
from lib_onediff.runtime.graphs.cache import CARD_IS_FULL
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights import binding, streaming
from lib_onediff.weights.streaming import RING, Streaming, chunks_of

# Against the host's own forward in float32.
ROUNDING = 1e-5
CPU = torch.device("cpu")


class TwoMemories:
    """Decides by the names of parameters which of them count as being in main memory. alone: the number of matrices
    that were copied outside of the schedule, because no unit named them."""

    def __init__(self) -> None:
        self.is_away: Callable[[str], bool] = lambda name: True
        self.copy_stream: type[EarlyCopyStream] = LateCopyStream
        self.alone = 0
        self._names: dict[int, str] = {}

    def knows(self, unet: nn.Module) -> None:
        self._names |= {id(parameter): name for name, parameter in unet.named_parameters()}

    def lies_away(self, parameter: Tensor, device: torch.device) -> bool:
        return self.is_away(self._names.get(id(parameter), ""))


@pytest.fixture
def two_memories(pretended: PretendedGraphs, monkeypatch: pytest.MonkeyPatch) -> TwoMemories:
    """Weights are streamed through a ring with room for a few units. It is filled with NaN first, so that reading a
    weight that was not copied shows in the output."""
    found = TwoMemories()
    monkeypatch.setattr(streaming, "RING", 1 << 14)
    monkeypatch.setattr(streaming, "LEAST_CHUNK", 1 << 12)
    monkeypatch.setattr(binding, "lies_away", found.lies_away)
    use_copy_stream(monkeypatch, lambda: found.copy_stream())
    made = streaming.room_of
    alone = Streaming.alone

    def poisoned(size: int, device: torch.device) -> Tensor:
        return made(size, device).fill_(0xFF)

    def counted(self: Streaming, name: str) -> Tensor:
        found.alone += 1
        return alone(self, name)

    monkeypatch.setattr(streaming, "room_of", poisoned)
    monkeypatch.setattr(Streaming, "alone", counted)
    return found


def compiled_with(two_memories: TwoMemories, **options: Any) -> Any:
    unet = diffusers_unet(**SMALL_XL)
    two_memories.knows(unet)
    return lib_onediff.compile_unet(unet, **options)


def half(name: str) -> bool:
    """Whether a parameter is in main memory: about half of them, and each to_k, so that some fused layers are only
    partly there."""
    return zlib.crc32(name.encode()) % 2 == 0 or "to_k" in name


AWAY: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True, "half": half, "one": lambda name: name == "conv_out.weight",
}


def is_close_to_host(unet: Any, call: Any) -> bool:
    return relative_error(served(unet, call), diffusers_output(unet, call)) < ROUNDING


@pytest.mark.parametrize("copy_stream", [EarlyCopyStream, LateCopyStream])
@pytest.mark.parametrize("which", AWAY)
def test_with_streamed_weights_our_output_is_close_to_the_output_of_the_host(
    two_memories: TwoMemories, copy_stream: type[EarlyCopyStream], which: str
) -> None:
    """At two sizes, without a graph and with one. A wrong mark makes one of the two copy streams give a wrong weight.
    which: the weights in main memory."""
    two_memories.copy_stream = copy_stream
    two_memories.is_away = AWAY[which]
    unet = compiled_with(two_memories)
    for size in (8, 8, 8, 12, 12, 12):
        assert is_close_to_host(unet, a_call(unet, size, size))
    assert served_by() == ("native", "graph") and "MiB of its weights" in reason()
    assert two_memories.alone == 0


def test_the_units_of_a_full_pass_name_each_layer_once_and_a_cached_pass_has_fewer(two_memories: TwoMemories) -> None:
    """The matrix of a layer that no unit names would be copied outside of the schedule. A cached pass of DeepCache
    reads fewer layers."""
    layout = runtime.services.families.read(compiled_with(two_memories, deepcache_interval=2))
    whole = layout.units(None)
    shallow = layout.units(1)
    names = [name for unit in whole for name in unit]
    assert len(names) == len(set(names)) and set(names) == {
        *(fusion.name for fusion in layout.fusions()), *(leaf.path for leaf in layout.leaves())
    } - {member.path for fusion in layout.fusions() for member in fusion.members}
    assert [unit for unit in whole if unit in shallow] == shallow and len(shallow) < len(whole)


@pytest.mark.parametrize("copy_stream", [EarlyCopyStream, LateCopyStream])
def test_the_units_of_a_cached_pass_name_every_weight_that_it_reads(
    two_memories: TwoMemories, copy_stream: type[EarlyCopyStream]
) -> None:
    """A weight that no unit of DeepCache's cached pass names would be copied outside of the schedule (alone). The
    outputs are compared with those of a UNet with equal weights that are not streamed."""
    two_memories.copy_stream = copy_stream
    options = {"deepcache_interval": 2, "deepcache_depth": 1}
    streamed = compiled_with(two_memories, **options)
    twin = lib_onediff.compile_unet(diffusers_unet(**SMALL_XL), **options)
    times = range(981, 0, -90)

    def sample(unet: Any) -> list[torch.Tensor]:
        """The outputs of a sampling in which every second step is a cached pass."""
        calls = [replace(a_call(unet), timestep=torch.full((2,), float(time))) for time in times]
        before = lib_onediff.status()["deepcache"]["cached"]
        with lib_onediff.sampling(unet, times):
            outputs = [served(unet, call) for call in calls]
        assert lib_onediff.status()["deepcache"]["cached"] > before
        return outputs

    for output, expected in zip(sample(streamed), sample(twin), strict=True):
        assert relative_error(output, expected) < ROUNDING
    assert two_memories.alone == 0


@pytest.mark.parametrize("copy_stream", [EarlyCopyStream, LateCopyStream])
def test_after_each_kind_of_edit_no_old_weight_is_read_from_the_ring(
    two_memories: TwoMemories, copy_stream: type[EarlyCopyStream]
) -> None:
    """Weights are edited in place, edited through .data (torch's version counter does not change), moved, and replaced.
    After each edit, the output must be close to the host's."""
    two_memories.copy_stream = copy_stream
    unet = compiled_with(two_memories)
    call = a_call(unet)
    other = diffusers_unet(seed=5, **SMALL_XL)
    for _ in range(4):
        assert is_close_to_host(unet, call)
    edits: list[Callable[[nn.Parameter, Tensor], object]] = [
        lambda mine, theirs: mine.copy_(theirs),  # in place, as merging a LoRA
        lambda mine, theirs: mine.data.mul_(0.7),  # in a way that torch does not count
        lambda mine, theirs: setattr(mine, "data", 0.5 * theirs),  # moved
    ]
    for edit in edits:
        with torch.no_grad():
            for mine, theirs in zip(unet.parameters(), other.parameters(), strict=True):
                edit(mine, theirs)
        for _ in range(3):
            assert is_close_to_host(unet, call)
    for layer, theirs in zip(unet.modules(), copy.deepcopy(other).modules(), strict=True):
        # Replaced, as by another checkpoint in the same modules.
        for name, parameter in theirs._parameters.items():
            layer._parameters[name] = parameter
    two_memories.knows(unet)
    for _ in range(3):
        assert is_close_to_host(unet, call)
    assert two_memories.alone == 0


def test_weights_are_streamed_only_while_the_webui_keeps_them_in_main_memory(two_memories: TwoMemories) -> None:
    """The WebUI moves all weights to main memory, then half of them, none, and half again. The output must be close to
    the host's each time."""
    unet = compiled_with(two_memories)
    call = a_call(unet)
    for is_away in (lambda name: True, half, lambda name: False, half):
        two_memories.is_away = is_away
        for parameter in unet.parameters():
            # It is in other memory then.
            parameter.data = parameter.data.clone()
        for _ in range(3):
            assert is_close_to_host(unet, call)
        network = runtime.services.networks.get(unet)
        assert network is not None and (network.bound.streaming is None) == (not network.bound.binding.away)


@pytest.mark.parametrize("copy_stream", [EarlyCopyStream, LateCopyStream])
def test_after_a_forward_that_failed_in_the_middle_the_next_output_is_close_to_the_host(
    two_memories: TwoMemories, native_operators: StandInOperators, copy_stream: type[EarlyCopyStream]
) -> None:
    """Copies that the failed forward had begun must not be taken for those of the next forward."""
    two_memories.copy_stream = copy_stream
    unet = compiled_with(two_memories)
    call = a_call(unet)
    for _ in range(2):
        assert is_close_to_host(unet, call)
    native_operators.fail_with(RuntimeError("cancelled"))
    assert is_close_to_host(unet, call)
    assert "computation failed: cancelled" in reason(), "the next backend's refusal does not hide the fault"
    native_operators.recover()
    for _ in range(4):
        assert is_close_to_host(unet, call)


def test_buffers_for_streamed_weights_are_not_counted_as_memory_of_a_graph(
    two_memories: TwoMemories, pretended: PretendedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The need of a graph is measured as the peak memory of a call. In the first measured call, the buffers exist
    already; after release_memory(), they are made during the measured call (whole: the bytes that it adds). Both needs
    must be equal."""
    unet = compiled_with(two_memories)
    peaks = list[int]()
    network = runtime.services.networks.get(unet)
    peak = pretended.peak
    whole = list[int]()
    assert network is not None

    def real(device: torch.device, work: Callable[[], Any]) -> tuple[Any, int]:
        before = network.bound.bytes
        output, most = peak(device, work)
        whole.append(network.bound.bytes - before)
        return output, most + whole[-1]

    monkeypatch.setattr(pretended, "peak", real)
    monkeypatch.setattr(graph_cache, "needs_of", lambda peak, one: peaks.append(peak) or peak)
    for _ in range(2):
        assert is_close_to_host(unet, a_call(unet)) and is_close_to_host(unet, a_call(unet))
        for entry in runtime.services.table.entries():
            entry.needs = 0
        runtime.release_memory()
    assert whole[0] == 0 < whole[1] and peaks[0] == peaks[1]


def test_functions_of_other_extensions_run_with_streamed_weights(two_memories: TwoMemories) -> None:
    """FreeU's functions here. With them, no CUDA graph is used. The output must be close to the host's with FreeU."""
    unet = compiled_with(two_memories)
    call = a_call(unet)
    for _ in range(3):
        assert is_close_to_host(unet, call)
    for block in unet.up_blocks:
        block.s1 = 0.9
        block.s2 = 0.2
        block.b1 = 1.2
        block.b2 = 1.4
    for _ in range(4):
        assert is_close_to_host(unet, call)
    assert served_by() == ("cudagraph", "plain") and "FreeU" in reason()


def test_streaming_keeps_no_parameter_of_a_deleted_network_alive(two_memories: TwoMemories) -> None:
    unet = compiled_with(two_memories)
    for _ in range(3):
        served(unet, a_call(unet))
    parameter = weakref.ref(next(unet.parameters()))
    del unet
    gc.collect()
    assert parameter() is None


def test_no_chunk_of_the_ring_overwrites_a_chunk_that_is_still_to_be_read() -> None:
    """A chunk is a part of the ring that one copy fills. It may overlap an earlier chunk only if its copy waits for the
    units that read that one. Checked for 300 random schedules, whose chunks must also cover all bytes."""
    for seed in range(300):
        chance = random.Random(seed)
        sizes = [chance.choice((0, chance.randint(1, 60))) for _ in range(chance.randint(1, 60))]
        ring = 2 * max(sizes) + chance.randint(0, 100)
        found = chunks_of(sizes, ring, least=20)
        assert sum(chunk.size for chunk in found) == sum(sizes)
        assert all(chunk.start + chunk.size <= ring for chunk in found)
        for index, chunk in enumerate(found):
            for number, other in enumerate(found[:index], 1):
                apart = other.start + other.size <= chunk.start or chunk.start + chunk.size <= other.start
                assert apart or number <= chunk.waits
            # The copy that it waits for is done before its own units begin.
            assert chunk.waits <= index and (not index or found[index - 1].last_unit < chunk.last_unit)


# --- in eight bits ------------------------------------------------------------------------------------------------


@pytest.fixture
def eight_bit_unet(on_a_gpu: StandInOperators, two_memories: TwoMemories) -> Any:
    """A UNet in float16 that OneDiff computes with 8-bit copies only, while the host keeps all its weights in main
    memory, from which it moves them itself."""
    from low_bit_builders import half_unet

    unet = half_unet()
    two_memories.knows(unet)
    lib_onediff.compile_unet(unet, low_bit="int8", low_bit_only=True)
    return unet


def is_within_8_bit_rounding(unet: Any, call: Any) -> bool:
    error = relative_error(served(unet, call), diffusers_output(unet, call))
    return 1e-4 < error < 0.05


def test_weights_kept_in_eight_bits_on_the_gpu_are_not_streamed(eight_bit_unet: Any) -> None:
    """After an edit through .data, which torch's version counter does not show, the output must have the edited
    weights."""
    from low_bit_builders import half_call

    call = half_call(eight_bit_unet)
    for _ in range(4):
        assert is_within_8_bit_rounding(eight_bit_unet, call)
    network = runtime.services.networks.get(eight_bit_unet)
    assert network is not None and network.low_bit is not None and network.bound.streaming is not None
    assert lib_onediff.status()["lossy"] == "8-bit only" and served_by()[1] == "graph"
    whole = network.bound.streaming.copied()
    rest = network.bound.streaming.copied(network.low_bit.names())
    assert rest < whole and f"{rest / 2**20:.0f} MiB" in reason() or not rest
    with torch.no_grad():
        for name, parameter in eight_bit_unet.named_parameters():
            if "ff.net" in name:
                parameter.data.mul_(0.5)  # in a way that torch does not count
    for _ in range(3):
        assert is_within_8_bit_rounding(eight_bit_unet, call)


def test_the_next_sampling_at_a_size_begins_with_the_memory_that_the_last_one_lacked(
    two_memories: TwoMemories, pretended: PretendedGraphs
) -> None:
    """In the first sampling at a size, a graph lacks memory, and OneDiff asks the WebUI to move weights off the GPU
    between two steps (make_room). Before later ones, room_lacked() returns these bytes, so that OneDiff does not ask
    again. It returns fewer after another program has freed memory."""
    unet = compiled_with(two_memories)
    card = pretended.card
    room_requests = list[int]()
    network = runtime.services.networks.get(unet)
    assert network is not None

    def make_room(unet: Any, size: int) -> int:
        room_requests.append(size)
        card.others -= size
        return size

    def sampling(size: str, left: int) -> int:
        """Make a sampling, before which the host has moved the weights, and leaves free what room_lacked() returns and
        `left` bytes. Returns what room_lacked() has returned."""
        for parameter in unet.parameters():
            parameter.data = parameter.data.clone()
        lacked = runtime.room_lacked(unet, size)
        card.others = 0
        card.others = card.free(CPU) - left - lacked
        runtime.begin_sampling(unet)
        for _ in range(4):
            assert is_close_to_host(unet, a_call(unet))
        assert served_by() == ("native", "graph")
        return lacked

    card.size = 24 << 30
    network.bound.host_traits = replace(network.bound.host_traits, make_room=make_room)
    assert sampling("512x512", 600 << 20) == 0
    [lacked] = room_requests
    assert lacked > 64 << 20
    assert [sampling(size, 600 << 20) for size in ("512x512", "512x512", "768x768")] == [lacked, lacked, 0]
    assert room_requests == [lacked] * 2, "once at each size"
    # Another program has freed memory.
    assert [sampling("512x512", 650 << 20), sampling("512x512", 650 << 20)] == [lacked, lacked - (50 << 20)]
    assert len(room_requests) == 2


def test_after_a_streamed_call_runs_out_of_memory_the_webui_moves_weights_off_the_gpu(
    two_memories: TwoMemories, native_operators: StandInOperators, pretended: PretendedGraphs
) -> None:
    """Two calls run out of memory: the host computes them, and OneDiff asks it for memory, the second time for more.
    The later calls are ours. Before the next sampling, room_lacked() returns the sum, so that all its calls are
    ours."""
    two_memories.is_away = half
    unet = compiled_with(two_memories)
    card = pretended.card
    card.size = 24 << 30
    network = runtime.services.networks.get(unet)
    room_requests = list[int]()
    held = list[int]()
    assert network is not None

    def computed(tokens: Tensor, unit: Any, consumer: Any) -> Tensor:
        if card.free(CPU) < 700 << 20:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return torch_ops.gated(tokens, unit, consumer)

    def make_room(unet: nn.Module, size: int) -> int:
        room_requests.append(size)
        held.append(network.bound.bytes)
        card.others -= size
        two_memories.is_away = lambda name: True
        for parameter in unet.parameters():
            parameter.data = parameter.data.clone()
        return size

    def sampling() -> tuple[int, list[str]]:
        """Make a sampling. Returns the bytes that the host leaves free in addition to 300 MiB, and the route of each
        call."""
        two_memories.is_away = half
        for parameter in unet.parameters():
            parameter.data = parameter.data.clone()
        lacked = runtime.room_lacked(unet, "512x512")
        card.others = 0
        card.others = card.free(CPU) - (300 << 20) - lacked
        runtime.begin_sampling(unet)
        routes = list[str]()
        for _ in range(5):
            assert is_close_to_host(unet, a_call(unet))
            routes.append(served_by()[1])
            assert (reason() == WEIGHTS_MOVED) == (routes[-1] == "host")
        return lacked, routes

    native_operators.gated_by = computed
    network.bound.host_traits = replace(network.bound.host_traits, make_room=make_room)
    assert sampling() == (0, ["host", "host", "plain", "plain", "graph"])
    assert room_requests == [RING, 2 * RING] and held == [0, 0], "what OneDiff held was freed before"
    assert sampling() == (3 * RING, ["plain", "graph", "graph", "graph", "graph"])
    assert len(room_requests) == 2


def test_a_webui_that_moves_no_weights_computes_streamed_calls_that_run_out_of_memory(
    two_memories: TwoMemories, native_operators: StandInOperators
) -> None:
    """In a sampling, OneDiff tries only the first call, and the WebUI computes all of them. Outside of samplings,
    OneDiff tries each call: there is no end of a sampling after which it could try again."""
    two_memories.is_away = half
    unet = compiled_with(two_memories)
    native_operators.fail_with(torch.cuda.OutOfMemoryError("CUDA out of memory"))
    runtime.begin_sampling(unet)
    for why in (OUT_OF_MEMORY, NO_ROOM_YET, NO_ROOM_YET):
        assert is_close_to_host(unet, a_call(unet))
        assert served_by()[1] == "host" and reason() == why
    assert native_operators.calls == 1
    runtime.end_sampling(unet)
    for _ in range(2):
        assert is_close_to_host(unet, a_call(unet))
        assert served_by()[1] == "host" and reason() == OUT_OF_MEMORY
    assert native_operators.calls == 3


def test_a_warm_up_that_runs_out_of_memory_does_not_make_the_webui_move_weights(
    two_memories: TwoMemories, native_operators: StandInOperators
) -> None:
    """A warm-up belongs to no image: the moved weights would be missing on the GPU in the next image, at another size.
    In a sampling, the WebUI does move weights."""
    unet = compiled_with(two_memories)
    network = runtime.services.networks.get(unet)
    room_requests = list[int]()
    assert network is not None

    def make_room(unet: Any, size: int) -> int:
        room_requests.append(size)
        return 1

    network.bound.host_traits = replace(network.bound.host_traits, make_room=make_room)
    native_operators.fail_with(torch.cuda.OutOfMemoryError("CUDA out of memory"))
    with runtime.warming_up():
        assert is_close_to_host(unet, a_call(unet))
    assert not room_requests
    runtime.begin_sampling(unet)
    assert is_close_to_host(unet, a_call(unet)) and reason() == WEIGHTS_MOVED and room_requests == [RING]


@pytest.mark.parametrize("takes", [True, False])
def test_the_host_moves_weights_off_the_gpu_to_make_room_for_those_in_eight_bits(
    eight_bit_unet: Any, two_memories: TwoMemories, monkeypatch: pytest.MonkeyPatch, takes: bool
) -> None:
    """takes: whether the host moves weights when OneDiff asks. If not, no 8-bit weights are used, and the reason is
    that GPU memory is missing."""
    from low_bit_builders import half_call

    call = half_call(eight_bit_unet)
    network = runtime.services.networks.get(eight_bit_unet)
    room_requests = list[int]()
    assert network is not None
    two_memories.is_away = half

    def make_room(unet: Any, size: int) -> bool:
        room_requests.append(size)
        if takes:
            two_memories.is_away = lambda name: True
            monkeypatch.setattr(runtime.services.holdings.card, "room", lambda device: 1 << 40)
            for parameter in unet.parameters():
                parameter.data = parameter.data.clone()
        return takes

    network.bound.host_traits = replace(network.bound.host_traits, make_room=make_room)
    monkeypatch.setattr(runtime.services.holdings.card, "room", lambda device: RING)  # which is not the host's
    output = served(eight_bit_unet, call)
    assert relative_error(output, diffusers_output(eight_bit_unet, call)) < 0.05
    assert len(room_requests) == 1 and room_requests[0] > 0
    for _ in range(2):
        assert relative_error(served(eight_bit_unet, call), diffusers_output(eight_bit_unet, call)) < 0.05
    assert (lib_onediff.status()["lossy"] == "8-bit only") is takes, reason()
    assert takes or "Low-bit is inactive: there is not enough GPU memory for the 8-bit weights" in reason()


def test_weights_in_eight_bits_are_freed_for_a_graph_or_a_decode_that_lacks_memory(
    eight_bit_unet: Any, pretended: PretendedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has no more weights to move off the GPU. If a graph lacks memory, a part of the 8-bit weights is freed,
    or none if all of them would not be enough. Before a large decode, all are freed. They return when memory is
    free."""
    from low_bit_builders import half_call

    call = half_call(eight_bit_unet)
    card = pretended.card
    network = runtime.services.networks.get(eight_bit_unet)
    used = card.used
    held = lambda: 0 if network is None or network.low_bit is None else network.low_bit.bytes  # noqa: E731
    card.size = 24 << 30
    monkeypatch.setattr(card, "used", lambda: used() + held())
    monkeypatch.setattr(card_route, "ROOM_TO_SPARE", 0)

    def calls(number: int) -> str:
        for _ in range(number):
            assert is_within_8_bit_rounding(eight_bit_unet, call)
        assert lib_onediff.status()["lossy"] == "8-bit only", reason()
        return served_by()[1]

    assert calls(1) == "plain"
    all_of_them = held()
    left = card.free(CPU)
    card.others = left
    assert calls(2) == "plain" and CARD_IS_FULL in reason() and held() == all_of_them, "they alone are not enough"
    lacking = all_of_them // 4
    needs = runtime.rows()[0].needs
    card.others = left - memory_of(needs) - card.spare(CPU) + lacking
    assert calls(4) == "graph"
    assert all_of_them // 4 < all_of_them - held() < all_of_them // 2
    card.others = left
    runtime.pressure.before_decode(torch.empty(1, 4, 8, 8))
    assert held() == 0
    card.others = 0
    assert calls(3) == "graph" and held() == all_of_them


def test_a_peft_lora_is_part_of_the_weights_in_eight_bits(eight_bit_unet: Any, two_memories: TwoMemories) -> None:
    """With the LoRA at two strengths, the output must be within 8-bit rounding of the host's. After unload_lora(), it
    must equal the output before to the bit."""
    peft = pytest.importorskip("peft")
    from low_bit_builders import half_call

    call = half_call(eight_bit_unet)
    for _ in range(3):
        before = served(eight_bit_unet, call)
    eight_bit_unet.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "ff.net.2"], init_lora_weights=False))
    for strength in (1.0, 0.5):
        eight_bit_unet.set_adapters(["default"], [strength])
        for _ in range(3):
            assert is_within_8_bit_rounding(eight_bit_unet, call)
        assert lib_onediff.status()["lossy"] == "8-bit only", reason()
    eight_bit_unet.unload_lora()
    for _ in range(2):
        output = served(eight_bit_unet, call)
    assert torch.equal(output, before) and lib_onediff.status()["lossy"] == "8-bit only", reason()

"""Weights that lie in the computer's memory are there when they are computed with, and nothing stale ever is.

Both memories are a CPU's here. What tells them apart is which parameters are said to be away; the copies are as early,
or as late, as their marks allow."""
from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import SMALL_XL, a_call, diffusers_output, diffusers_unet, relative_error, served
from graph_builders import PretendedGraphs
from hypothesis import given, settings
from hypothesis import strategies as st
from ladder_builders import Weather, now, reason
from torch import Tensor, nn

import lib_onediff
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights import binding, bound, streaming
from lib_onediff.weights.streaming import Streaming, chunks_of

# Against the host's own forward in float32.
ROUNDING = 1e-5


class Early:
    """A Lane that copies as soon as it is told to: over what is still to be read, if its marks are wrong."""

    def __init__(self) -> None:
        self.behind: list[Callable[[], None]] = []

    def computed(self) -> int:
        return 0

    def copy(self, copies: Any, after: Any) -> int:
        for target, place in copies:
            target.copy_(place.bytes())
        return 0

    def wait(self, mark: int) -> None:
        pass


class Late(Early):
    """A Lane that copies when somebody waits for it, and no sooner: what is read before is what was there."""

    def copy(self, copies: Any, after: Any) -> int:
        self.behind.append(lambda: super(Late, self).copy(copies, after) and None)
        return len(self.behind)

    def wait(self, mark: int) -> None:
        for one in self.behind[:mark]:
            one()
        self.behind[:mark] = [lambda: None] * len(self.behind[:mark])


class Computer:
    """Which parameters are away, by their names; and how often a matrix was copied where that is no plan's."""

    def __init__(self) -> None:
        self.is_away: Callable[[str], bool] = lambda name: True
        self.lane: type[Early] = Late
        self.alone = 0
        self._names: dict[int, str] = {}

    def knows(self, unet: nn.Module) -> None:
        self._names |= {id(parameter): name for name, parameter in unet.named_parameters()}

    def lies_away(self, parameter: Tensor, device: torch.device) -> bool:
        return self.is_away(self._names.get(id(parameter), ""))


@pytest.fixture
def computer(pretended: PretendedGraphs, monkeypatch: pytest.MonkeyPatch) -> Computer:
    """A UNet's weights go through a ring of a few units."""
    found = Computer()
    monkeypatch.setattr(streaming, "RING", 1 << 14)
    monkeypatch.setattr(streaming, "LEAST_CHUNK", 1 << 12)
    monkeypatch.setattr(binding, "lies_away", found.lies_away)
    monkeypatch.setattr(bound, "streaming_of", lambda of, units, memory: Streaming(
        of, units, of.device, found.lane(), memory, pinned=False
    ))
    made, alone = streaming.room_of, Streaming.alone

    def poisoned(size: int, device: torch.device) -> Tensor:
        return made(size, device).fill_(0xFF)

    def counted(self: Streaming, name: str) -> Tensor:
        found.alone += 1
        return alone(self, name)

    monkeypatch.setattr(streaming, "room_of", poisoned)
    monkeypatch.setattr(Streaming, "alone", counted)
    return found


def in_our_care(computer: Computer, **options: Any) -> Any:
    unet = diffusers_unet(**SMALL_XL)
    computer.knows(unet)
    return lib_onediff.compile_unet(unet, **options)


def half(name: str) -> bool:
    """Of the members of fused layers too."""
    return hash(name) % 2 == 0 or "to_k" in name


AWAY: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True, "half": half, "one": lambda name: name == "conv_out.weight",
}


def is_right(unet: Any, call: Any) -> bool:
    return relative_error(served(unet, call), diffusers_output(unet, call)) < ROUNDING


@pytest.mark.parametrize("lane", [Early, Late])
@pytest.mark.parametrize("which", AWAY)
def test_it_computes_what_the_host_does(computer: Computer, lane: type[Early], which: str) -> None:
    computer.lane, computer.is_away = lane, AWAY[which]
    unet = in_our_care(computer)
    for size in (8, 8, 8, 12, 12, 12):
        assert is_right(unet, a_call(unet, size, size))
    assert now() == ("native", "graph") and "MiB of its weights" in reason()
    assert computer.alone == 0


def test_the_units_of_a_network_are_all_its_layers_and_a_cached_pass_has_fewer(computer: Computer) -> None:
    """Were one missing, its matrix would be copied by itself."""
    layout = runtime.layout_of(in_our_care(computer, deepcache_interval=2))
    whole, shallow = layout.units(None), layout.units(1)
    names = [name for unit in whole for name in unit]
    assert len(names) == len(set(names)) and set(names) == {
        *(fusion.name for fusion in layout.fusions()), *(leaf.path for leaf in layout.leaves())
    } - {member.path for fusion in layout.fusions() for member in fusion.members}
    assert [unit for unit in whole if unit in shallow] == shallow and len(shallow) < len(whole)


@pytest.mark.parametrize("lane", [Early, Late])
def test_deepcache_copies_what_a_cached_pass_reads_alone(computer: Computer, lane: type[Early]) -> None:
    computer.lane = lane
    unet = in_our_care(computer)
    plain, cached = copy.deepcopy(unet), in_our_care(computer, deepcache_interval=2, deepcache_depth=1)
    assert plain is not None
    call = a_call(unet)
    for _ in range(3):
        assert is_right(cached, call)
    assert computer.alone == 0


@pytest.mark.parametrize("lane", [Early, Late])
def test_no_stale_weight_is_computed_with(computer: Computer, lane: type[Early]) -> None:
    computer.lane = lane
    unet = in_our_care(computer)
    call, other = a_call(unet), diffusers_unet(seed=5, **SMALL_XL)
    for _ in range(4):
        assert is_right(unet, call)
    edits: list[Callable[[nn.Parameter, Tensor], object]] = [
        lambda mine, theirs: mine.copy_(theirs),  # in place, as merging a LoRA
        lambda mine, theirs: mine.data.mul_(0.7),  # so that torch counts nothing
        lambda mine, theirs: setattr(mine, "data", 0.5 * theirs),  # moved
    ]
    for edit in edits:
        with torch.no_grad():
            for mine, theirs in zip(unet.parameters(), other.parameters(), strict=True):
                edit(mine, theirs)
        for _ in range(3):
            assert is_right(unet, call)
    for layer, theirs in zip(unet.modules(), copy.deepcopy(other).modules(), strict=True):
        # Exchanged, as another checkpoint over the same network.
        for name, parameter in theirs._parameters.items():
            layer._parameters[name] = parameter
    computer.knows(unet)
    for _ in range(3):
        assert is_right(unet, call)
    assert computer.alone == 0


def test_what_the_host_brings_to_the_gpu_is_not_copied_and_what_it_takes_from_there_is(computer: Computer) -> None:
    unet = in_our_care(computer)
    call = a_call(unet)
    for is_away in (lambda name: True, half, lambda name: False, half):
        computer.is_away = is_away
        for parameter in unet.parameters():
            # It lies elsewhere then.
            parameter.data = parameter.data.clone()
        for _ in range(3):
            assert is_right(unet, call)
        managed = runtime.managed_unet(unet)
        assert managed is not None and (managed.bound.streaming is None) == (not managed.bound.binding.away)


@pytest.mark.parametrize("lane", [Early, Late])
def test_a_forward_that_fails_leaves_nothing_for_the_next_one(
    computer: Computer, weather: Weather, lane: type[Early]
) -> None:
    computer.lane = lane
    unet = in_our_care(computer)
    call = a_call(unet)
    for _ in range(2):
        assert is_right(unet, call)
    weather.raises(RuntimeError("cancelled"))
    assert is_right(unet, call)
    weather.clears()
    for _ in range(4):
        assert is_right(unet, call)


def test_functions_of_other_extensions_run_within_it(computer: Computer) -> None:
    unet = in_our_care(computer)
    call = a_call(unet)
    for _ in range(3):
        assert is_right(unet, call)
    for block in unet.up_blocks:
        block.s1, block.s2, block.b1, block.b2 = 0.9, 0.2, 1.2, 1.4
    for _ in range(4):
        assert is_right(unet, call)
    assert now() == ("cudagraph", "plain") and "FreeU" in reason()


def test_nothing_keeps_the_memory_of_a_network_that_is_gone(computer: Computer) -> None:
    unet = in_our_care(computer)
    for _ in range(3):
        served(unet, a_call(unet))
    parameter = weakref.ref(next(unet.parameters()))
    del unet
    gc.collect()
    assert parameter() is None


@given(st.lists(st.integers(0, 60), min_size=1, max_size=60), st.integers(0, 100))
@settings(deadline=None)
def test_a_chunk_is_written_once_what_it_lies_over_was_read(sizes: list[int], spare: int) -> None:
    ring = 2 * max(sizes) + spare
    found = chunks_of(sizes, ring, least=20)
    assert sum(chunk.size for chunk in found) == sum(sizes)
    assert all(chunk.start + chunk.size <= ring for chunk in found)
    for place, chunk in enumerate(found):
        for number, other in enumerate(found[:place], 1):
            apart = other.start + other.size <= chunk.start or chunk.start + chunk.size <= other.start
            assert apart or number <= chunk.waits
        # What it waits for is over before its own units begin.
        assert chunk.waits <= place and (not place or found[place - 1].last_unit < chunk.last_unit)

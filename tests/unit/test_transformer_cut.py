"""DeepCache in a transformer. A full pass runs all blocks, and keeps the change that the blocks behind the cut add to
the tokens; a cached pass runs the blocks before the cut, and adds the kept change. The reference is diffusers' own
forward, in which one block that adds the kept change replaces the blocks behind the cut.

depth: the number of blocks before the cut.
"""
from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from bound_network import BoundNetwork
from builders import CONTEXT_WIDTH, diffusers_unet, relative_error
from own_forward import own_forward
from test_cosmos import call, network
from torch import Tensor, nn

import lib_onediff
from lib_onediff.core.call import Call, Cut, CutMemory
from lib_onediff.core.settings import DEEPCACHE_OPTIONS, TRANSFORMER_OPTIONS
from lib_onediff.hosts.diffusers.cosmos import cosmos_call
from lib_onediff.runtime.runtime import runtime

BLOCKS = 4
DEPTHS = (1, 3)
TIMES = [1 - step / 12 for step in range(12)]


class AddChange(nn.Module):
    """A block that adds a constant change, in place of the blocks behind the cut."""

    def __init__(self, change: Tensor) -> None:
        super().__init__()
        self.change = change

    def forward(self, hidden_states: Tensor, *others: Any, **named: Any) -> Tensor:
        return hidden_states + self.change


class HostCut:
    """The reference: full and cached passes of a copy of a network, by diffusers' forward. change: what the blocks
    behind the cut have added in the last full pass."""

    def __init__(self, unet: Any, depth: int) -> None:
        self.unet = copy.deepcopy(unet)
        self.depth = depth
        self.change = torch.zeros(())

    @torch.no_grad()
    def whole(self, given: dict[str, Any]) -> Tensor:
        """The output of a full pass. Keeps the change."""
        blocks = self.unet.transformer_blocks
        found: list[Tensor] = []
        hooks = [
            blocks[index].register_forward_hook(lambda block, inputs, output: found.append(output))
            for index in (self.depth - 1, -1)
        ]
        output = own_forward(self.unet)(**given).sample
        for hook in hooks:
            hook.remove()
        self.change = found[1] - found[0]
        return output

    @torch.no_grad()
    def cached(self, given: dict[str, Any]) -> Tensor:
        """The output of a cached pass."""
        blocks = self.unet.transformer_blocks
        self.unet.transformer_blocks = nn.ModuleList([*blocks[:self.depth], AddChange(self.change)])
        try:
            return own_forward(self.unet)(**given).sample
        finally:
            self.unet.transformer_blocks = blocks


def cut_at(given: Call, depth: int, memory: CutMemory, reads: bool) -> Any:
    """The call as a full pass (reads=False) or a cached pass (reads=True). memory: where the change is kept."""
    return replace(given, cut=Cut(depth, reads, memory))


@pytest.mark.parametrize("depth", [*DEPTHS, 11])
def test_a_full_pass_equals_the_forward_without_a_cut_and_a_cached_pass_repeats_its_output(depth: int) -> None:
    """A full pass equals the forward to the bit. A cached pass of the same call adds the change that the full pass has
    kept, and is close to it. A depth of 11 is more than the network's four blocks."""
    unet = network(num_layers=BLOCKS)
    bound = BoundNetwork(unet)
    given = cosmos_call(unet, **call())
    memory = CutMemory()
    whole = bound.output(cut_at(given, depth, memory, reads=False))
    assert torch.equal(whole, bound.output(given))
    assert relative_error(bound.output(cut_at(given, depth, memory, reads=True)), whole) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_in_half_precision_a_cached_pass_repeats_the_output_of_the_full_pass(dtype: torch.dtype) -> None:
    """The relative error is below one rounding of the dtype, in which the change is kept."""
    unet = network(num_layers=BLOCKS).to(dtype)
    bound = BoundNetwork(unet)
    given = cosmos_call(unet, **call())
    given = replace(given, latent=given.latent.to(dtype), context=given.context.to(dtype))
    memory = CutMemory()
    whole = bound.output(cut_at(given, 1, memory, reads=False))
    again = bound.output(cut_at(given, 1, memory, reads=True))
    assert relative_error(again.float(), whole.float()) < torch.finfo(dtype).eps


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_cached_pass_is_close_to_the_first_blocks_of_the_host_plus_the_kept_change(depth: int) -> None:
    """The cached pass has another timestep than the full pass before it. A full pass of the host at that timestep has
    another output."""
    unet = network(num_layers=BLOCKS)
    bound = BoundNetwork(unet)
    host = HostCut(unet, depth)
    memory = CutMemory()
    earlier = call(14, 6)
    expected = host.whole(earlier)
    ours = bound.output(cut_at(cosmos_call(unet, **earlier), depth, memory, reads=False))
    assert relative_error(ours, expected) < 1e-5 and relative_error(memory.read(), host.change) < 1e-5
    later = {**call(14, 6), "timestep": torch.tensor([0.4, 0.1])}
    ours = bound.output(cut_at(cosmos_call(unet, **later), depth, memory, reads=True))
    assert relative_error(ours, host.cached(later)) < 1e-5 and relative_error(ours, host.whole(later)) > 1e-3


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_units_of_a_cached_pass_name_the_weights_that_it_reads_in_this_order(depth: int) -> None:
    """Units are groups of layers in the order in which their weights are streamed. check_reads() raises if they name
    other weights than the pass reads, or in another order. The pass reads no weight of the first block behind the
    cut."""
    unet = network(num_layers=BLOCKS)
    bound = BoundNetwork(unet)
    given = cosmos_call(unet, **call())
    memory = CutMemory()
    bound.output(cut_at(given, depth, memory, reads=False))
    cached = cut_at(given, depth, memory, reads=True)
    bound.output(cached)
    bound.check_reads(cached)
    assert not any(f"transformer_blocks.{depth}." in name for name in bound.read)


# --- in a sampling ----------------------------------------------------------------------------------------------------


@pytest.fixture
def unet() -> Iterator[Any]:
    made = network(num_layers=BLOCKS)
    yield lib_onediff.compile_unet(made, deepcache_interval=2)
    lib_onediff.uncompile_unet(made)


def step_at(number: int) -> dict[str, Any]:
    """The arguments of a step of a sampling, by its number."""
    given = call()
    return {**given, "timestep": torch.full((2,), TIMES[number]), "hidden_states": given["hidden_states"] + number}


def cached_steps() -> int:
    """How many cached passes the status counts."""
    return int(runtime.status()["deepcache"]["cached"])


@torch.no_grad()
def run_steps(unet: Any, host: HostCut) -> int:
    """Run a network through a sampling of TIMES, and compare each output with HostCut's for a full or a cached pass.
    Returns the number of cached passes."""
    found = 0
    with lib_onediff.sampling(unet, timesteps=TIMES):
        for number in range(len(TIMES)):
            before = cached_steps()
            given = step_at(number)
            output = unet(**given).sample
            assert lib_onediff.status()["route"] == "plain", lib_onediff.status()["reason"]
            is_cached = cached_steps() > before
            found += is_cached
            expected = host.cached(given) if is_cached else host.whole(given)
            assert relative_error(output, expected) < 1e-5, (number, is_cached)
    return found


def test_deepcache_computes_only_the_first_blocks_of_a_transformer_in_five_of_twelve_steps(unet: Any) -> None:
    """The network has deepcache_interval=2, and one block before the cut. run_steps() compares every output with the
    reference."""
    assert run_steps(unet, HostCut(unet, 1)) == 5
    assert runtime.status()["deepcache"]["reason"] == ""


@pytest.mark.parametrize(("options", "depth", "cached"), [
    ({"deepcache_interval": 3, "deepcache_depth": 3, "transformer_interval": 2}, 1, 5),
    ({"deepcache_depth": 0, "transformer_interval": 2}, 1, 5), ({"transformer_interval": 1}, 1, 0),
    ({"deepcache_interval": 2, "deepcache_depth": 2}, 2, 5),
    ({"deepcache_interval": 2, "transformer_interval": 1}, 1, 0),
], ids=str)
def test_transformer_interval_with_a_depth_of_1_overrides_the_options_of_deepcache(
    options: dict[str, int], depth: int, cached: int
) -> None:
    """depth and cached: the blocks before the cut, and the number of cached passes in twelve steps, that follow from
    the options. The infotext has the options that were followed, none if there was no cached pass."""
    unet = lib_onediff.compile_unet(network(num_layers=BLOCKS), **options)
    assert run_steps(unet, HostCut(unet, depth)) == cached
    followed = TRANSFORMER_OPTIONS if "transformer_interval" in options else DEEPCACHE_OPTIONS
    assert runtime.call_stats.image.cache_options == (followed if cached else frozenset())
    lib_onediff.uncompile_unet(unet)


def test_transformer_interval_has_no_effect_on_unets() -> None:
    """A sampling of a UNet has no cached pass. With deepcache_interval instead of transformer_interval, it has some."""
    for option, has_cached in (("transformer_interval", False), ("deepcache_interval", True)):
        unet = lib_onediff.compile_unet(diffusers_unet(), **{option: 2})
        before = cached_steps()
        # DeepCache computes a full pass when the prompt changes.
        prompt = torch.randn(1, 77, CONTEXT_WIDTH)
        with torch.no_grad(), lib_onediff.sampling(unet, timesteps=range(1000, 0, -50)):
            for time in range(1000, 0, -50):
                unet(torch.randn(1, 4, 8, 8), time, prompt)
        assert (cached_steps() > before) is has_cached
        lib_onediff.uncompile_unet(unet)


@pytest.mark.parametrize("path", ["transformer_blocks.0.attn1.to_q", "transformer_blocks.2.ff.net.2", "proj_out"])
@torch.no_grad()
def test_an_edit_before_or_behind_the_cut_takes_effect_at_the_next_step(unet: Any, path: str) -> None:
    """path: the path of the edited layer, in the block before the cut, behind the cut, or after all blocks. The next
    output is compared with a full pass of the reference with the same edit."""
    host = HostCut(unet, 1)
    with lib_onediff.sampling(unet, timesteps=TIMES):
        for number in (0, 1, 2, 3):
            unet(**step_at(number))
        assert cached_steps()
        for one in (unet, host.unet):
            one.get_submodule(path).weight.mul_(1.5)
        output = unet(**step_at(4)).sample
    assert relative_error(output, host.whole(step_at(4))) < 1e-5

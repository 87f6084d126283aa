"""LoRAs on the fly (which the host applies at each use of a weight) in graphs: another strength is written to the
memory that the graph reads, and every change affects the next output."""
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import SMALL_XL, a_call, diffusers_output, diffusers_unet, relative_error
from graph_builders import PretendedGraphs
from ladder_builders import CUDAGRAPH
from torch import Tensor, nn
from torch.nn import functional

from lib_onediff.core.settings import Settings
from lib_onediff.families.registry import FAMILIES
from lib_onediff.hosts.forge.weight_functions import LayerFunctions
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights.bound import BoundNetwork
from lib_onediff.weights.scan import HostTraits

CLOSE = 1e-5
FUSED = "mid_block.attentions.0.transformer_blocks.0.attn1.to_k"


class LowVramPatch:
    """ComfyUI's function for a list of patches."""

    def __init__(self, key: str, patches: dict[str, list[Any]]) -> None:
        self.key = key
        self.patches = patches

    def __call__(self, weight: Tensor) -> Tensor:
        for strength, (_, (up, down, *_)), *_ in self.patches[self.key]:
            weight = weight + strength * up @ down
        return weight


class HostLinear(nn.Linear):
    weight_function: Any = ()

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        for function in self.weight_function:
            weight = function(weight)
        return functional.linear(x, weight, self.bias)


HostLinear.__module__ = "backend.operations"
HostLinear.__qualname__ = "ForgeOperations.Linear"


def patch(strength: float, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    up, down = (torch.randn(shape, generator=generator) for shape in ((32, 4), (4, 32)))
    return [strength, ("lora", (up, down, 4.0, None, None)), 1.0, None, None]


@pytest.fixture
def unet(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = diffusers_unet(**SMALL_XL)
    for module in made.modules():
        if type(module) is nn.Linear:
            module.__class__ = HostLinear
    monkeypatch.setattr(nn.Conv2d, "weight_function", (), raising=False)
    return made


def checked_route(unet: Any) -> str:
    """The route of a call whose output is close to the host's."""
    call = a_call(unet)
    with torch.no_grad():
        expected = diffusers_output(unet, call)
        output = runtime.run(unet, call, lambda: expected)
    assert relative_error(output, expected) < CLOSE, runtime.status()["reason"]
    return str(runtime.status()["route"])


def other_strength(unet: Any, patches: dict[str, list[Any]]) -> None:
    for entries in patches.values():
        entries[0][0] = -0.7


def other_lora(unet: Any, patches: dict[str, list[Any]]) -> None:
    for entries in patches.values():
        entries[0][1] = patch(1.0, seed=9)[1]


def lora_uncounted(unet: Any, patches: dict[str, list[Any]]) -> None:
    """Edit a LoRA by .data, which torch does not count as an edit."""
    for entries in patches.values():
        entries[0][1][1][0].data.mul_(-1.5)


def weight_uncounted(unet: Any, patches: dict[str, list[Any]]) -> None:
    """Edit a weight by .data, which torch does not count as an edit."""
    unet.get_submodule(FUSED).weight.data.mul_(-1.5)


def one_more(unet: Any, patches: dict[str, list[Any]]) -> None:
    """Add another LoRA to each layer."""
    for entries in patches.values():
        entries.append(patch(0.4, seed=5))


def one_layer_fewer(unet: Any, patches: dict[str, list[Any]]) -> None:
    unet.get_submodule(FUSED).weight_function = []


def none(unet: Any, patches: dict[str, list[Any]]) -> None:
    for path in patches:
        unet.get_submodule(path).weight_function = []


@pytest.mark.parametrize(("change", "copies", "in_sampling", "in_place"), [
    (other_strength, False, False, True), (other_lora, False, False, True), (lora_uncounted, False, False, True),
    (one_more, False, False, True), (one_layer_fewer, False, False, False), (none, False, False, False),
    (other_strength, True, True, True), (one_more, True, False, True), (lora_uncounted, True, True, True),
    (weight_uncounted, True, False, True), (weight_uncounted, True, True, True),
], ids=lambda given: getattr(given, "__name__", None))
def test_changed_loras_affect_the_next_output_and_keep_the_graph_if_they_fit_into_its_memory(
    unet: Any, pretended: PretendedGraphs, change: Callable[[Any, Any], None], copies: bool, in_sampling: bool,
    in_place: bool,
) -> None:
    """Every output is compared with the host's. copies: the functions are not plain LoRAs, and are applied to copies of
    the weights. in_sampling: calls belong to an announced sampling. in_place: whether the graph is kept; one LoRA more
    also fits, because ranks are padded (core.layer_weights.RANKS)."""
    patches = {path: [patch(0.5)] for path in (FUSED, FUSED.replace("to_k", "to_out.0"))}
    for entries in patches.values() if copies else ():
        entries[0][2] = 0.9  # the strength of the model
    for path in patches:
        unet.get_submodule(path).weight_function = [LowVramPatch(path, patches)]
    runtime.adopt(unet, Settings(backend=CUDAGRAPH), HostTraits(trusted={__name__}, functions=LayerFunctions()))
    if in_sampling:
        runtime.begin_sampling(unet)
    assert [checked_route(unet) for _ in range(4)][-1] == "graph", runtime.status()["reason"]
    captured = len(pretended.captured)
    change(unet, patches)
    # Every output is compared with the host's. While the memory is the same, the graph stays.
    assert [checked_route(unet) for _ in range(3)][-1] == "graph"
    assert (len(pretended.captured) == captured) == in_place


def test_a_released_binding_keeps_no_tensor_of_a_lora(unet: Any) -> None:
    unet.get_submodule(FUSED).weight_function = [LowVramPatch(FUSED, {FUSED: [patch(0.5)]})]
    bound = BoundNetwork(unet, FAMILIES.read, HostTraits(trusted={__name__}, functions=LayerFunctions()))
    bound.refresh(a_call(unet))
    assert bound.on_the_fly.applied is not None
    kept = weakref.ref(bound.on_the_fly.applied.low_rank[FUSED].down)
    assert bound.bytes
    bound.release()
    assert not bound.bytes and kept() is None

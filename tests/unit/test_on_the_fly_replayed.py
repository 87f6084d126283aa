"""LoRAs on the fly in graphs: another strength is written to the same memory, and every change is noticed."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backend_names import CUDAGRAPH
from builders import SMALL_XL, a_call, diffusers_output, diffusers_unet, relative_error
from graph_builders import PretendedGraphs
from torch import Tensor, nn
from torch.nn import functional

from lib_onediff.hosts.forge.weight_functions import LayerFunctions
from lib_onediff.options.settings import Settings
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights.scan import HostTraits

CLOSE = 1e-5
FUSED = "mid_block.attentions.0.transformer_blocks.0.attn1.to_k"
PROMPTS = "mid_block.attentions.0.transformer_blocks.0.attn2.to_v"


class LowVramPatch:
    """ComfyUI's function for a list of patches."""

    def __init__(self, key: str, patches: dict[str, list[Any]]) -> None:
        self.key, self.patches = key, patches

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


HostLinear.__module__, HostLinear.__qualname__ = "backend.operations", "ForgeOperations.Linear"


def patch(strength: float, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    up, down = (torch.randn(shape, generator=generator) for shape in ((32, 4), (4, 32)))
    return [strength, ("lora", (up, down, 4.0, None, None)), 1.0, None, None]


@pytest.fixture
def unet() -> Any:
    made = diffusers_unet(**SMALL_XL)
    for module in made.modules():
        if type(module) is nn.Linear:
            module.__class__ = HostLinear
    made.conv_in.__class__.weight_function = ()
    return made


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> Any:
    yield
    if hasattr(nn.Conv2d, "weight_function"):
        del nn.Conv2d.weight_function


def put_on(unet: nn.Module, patches: dict[str, list[Any]]) -> None:
    for path in patches:
        layer: Any = unet.get_submodule(path)
        if layer.in_features == 32 or path == PROMPTS:
            layer.weight_function = [LowVramPatch(path, patches)]


def run(unet: Any, backend: str = CUDAGRAPH) -> str:
    traits = HostTraits(trusted={__name__}, functions=LayerFunctions())
    runtime.adopt(unet, Settings(backend=backend), traits)
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


def one_more(unet: Any, patches: dict[str, list[Any]]) -> None:
    for entries in patches.values():
        entries.append(patch(0.4, seed=5))


def one_layer_fewer(unet: Any, patches: dict[str, list[Any]]) -> None:
    unet.get_submodule(FUSED).weight_function = []


def none(unet: Any, patches: dict[str, list[Any]]) -> None:
    for path in patches:
        unet.get_submodule(path).weight_function = []


@pytest.mark.parametrize(("change", "in_place"), [
    (other_strength, True), (other_lora, True), (one_more, False), (one_layer_fewer, False),
    (none, False),
], ids=lambda given: getattr(given, "__name__", None))
def test_a_change_between_two_replays(
    unet: Any, pretended: PretendedGraphs, change: Callable[[Any, Any], None], in_place: bool
) -> None:
    patches = {path: [patch(0.5)] for path in (FUSED, FUSED.replace("to_k", "to_out.0"))}
    put_on(unet, patches)
    runtime.begin_sampling(unet)
    assert [run(unet) for _ in range(4)] == ["plain", "plain", "graph", "graph"], runtime.status()["reason"]
    captured = len(pretended.captured)
    change(unet, patches)
    # Checked once; then, in the same memory, the same graph.
    assert [run(unet) for _ in range(2)] == ["plain", "graph" if in_place else "plain"]
    assert run(unet) == "graph"
    assert (len(pretended.captured) == captured) == in_place

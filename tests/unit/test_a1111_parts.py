"""The parts of the A1111 adapter that need no A1111, with the real ldm UNet. The whole is tested by tests/webui."""
from __future__ import annotations

import functools
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from builders import SMALL_LDM, a_call, ldm_output, ldm_unet, relative_error
from torch import Tensor, nn

from lib_onediff.hosts.a1111.patches import does_nothing_now
from lib_onediff.hosts.a1111.layers import apply_wanted_networks, lora_module, wanted_names
from lib_onediff.hosts.changed_modules import author
from lib_onediff.model.patches import HostTraits
from lib_onediff.runtime.runtime import runtime

CLOSE = 1e-5
ADAPTED = (nn.Linear, nn.Conv2d)


@dataclass
class Network:
    """A LoRA as A1111's extension knows it; seed stands for its file."""

    name: str
    seed: int
    unet_multiplier: float = 1.0
    te_multiplier: float = 1.0
    dyn_dim: int | None = None

    def delta(self, layer: nn.Module) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + layer.weight.numel())
        return self.unet_multiplier * torch.randn(layer.weight.shape, generator=generator) * 0.02


@dataclass
class LazyNetworks(types.ModuleType):
    """Merges as A1111 does: in place, on demand, from a backup, and notes in the layer what it holds."""

    loaded_networks: list[Network] = field(default_factory=list)
    applied: int = 0

    def __post_init__(self) -> None:
        super().__init__("networks")

    def network_apply_weights(self, layer: Any) -> None:
        self.applied += 1
        if not hasattr(layer, "network_weights_backup"):
            layer.network_weights_backup = layer.weight.detach().clone()
        with torch.no_grad():
            layer.weight.copy_(layer.network_weights_backup)
            for network in self.loaded_networks:
                layer.weight += network.delta(layer)
        layer.network_current_names = wanted_names(self)


@pytest.fixture
def networks(monkeypatch: pytest.MonkeyPatch) -> LazyNetworks:
    stand_in = LazyNetworks()
    monkeypatch.setitem(sys.modules, "networks", stand_in)
    return stand_in


@pytest.fixture
def unet() -> Any:
    unet = ldm_unet(**SMALL_LDM)
    for name, layer in unet.named_modules():
        if isinstance(layer, ADAPTED):
            layer.network_layer_name = name
    runtime.adopt(unet, host_traits=HostTraits(sync_lora=apply_wanted_networks))
    yield unet
    runtime.release_all()


def ours(unet: Any) -> Tensor:
    call = a_call(unet)
    with torch.no_grad():
        output = runtime.run(unet, call, lambda: ldm_output(unet, call))
    assert runtime.status()["route"] == "plain", runtime.status()["reason"]
    return output


def merged_by_hand(networks: list[Network]) -> Tensor:
    unet = ldm_unet(**SMALL_LDM)
    with torch.no_grad():
        for layer in unet.modules():
            if isinstance(layer, ADAPTED):
                for network in networks:
                    layer.weight += network.delta(layer)
    return ldm_output(unet, a_call(unet))


def test_networks_in_turn_and_at_other_weights_never_show_the_previous_one(unet: Any, networks: LazyNetworks) -> None:
    one, other = Network("one", 1), Network("other", 2)
    weaker = Network("one", 1, unet_multiplier=0.4)
    plain = merged_by_hand([])
    for wanted in ([], [one], [other], [one, other], [weaker], [], [one], []):
        networks.loaded_networks = wanted
        output = ours(unet)
        assert relative_error(output, merged_by_hand(wanted)) < CLOSE
        assert (relative_error(output, plain) > 1e-2) == bool(wanted)


def test_a_merge_happens_once_per_change_and_layer(unet: Any, networks: LazyNetworks) -> None:
    layers = sum(isinstance(layer, ADAPTED) for layer in unet.modules())
    networks.loaded_networks = [Network("one", 1)]
    for _ in range(3):
        ours(unet)
    assert networks.applied == layers


def test_a_merge_in_place_binds_nothing_anew(unet: Any, networks: LazyNetworks) -> None:
    ours(unet)
    bound = runtime.managed_unet(unet).bound
    generation = bound.generation
    networks.loaded_networks = [Network("one", 1)]
    ours(unet)
    assert bound.generation == generation


def test_without_the_extension_there_is_nothing_to_do(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "networks", raising=False)
    assert lora_module() is None
    ours(unet)


def transformer_block(unet: Any) -> Any:
    return next(module for module in unet.modules() if type(module).__name__ == "BasicTransformerBlock")


def tiled(module: Any, enabled: bool) -> None:
    """What HyperTile leaves on an attention module for good."""
    parameters = types.SimpleNamespace(enabled=enabled, forward=module.forward)

    @functools.wraps(parameters.forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return parameters.forward(*args, **kwargs)

    module.__dict__["__webui_hypertile_params"] = parameters
    module.forward = wrapper


@pytest.mark.parametrize("enabled", [False, True])
def test_hypertile_counts_while_it_is_switched_on(unet: Any, enabled: bool) -> None:
    attention = transformer_block(unet).attn1
    tiled(attention, enabled)
    assert does_nothing_now(unet, attention) is not enabled


def test_somebody_elses_forward_over_hypertiles_counts(unet: Any) -> None:
    attention = transformer_block(unet).attn1
    tiled(attention, enabled=False)
    below = attention.forward
    attention.forward = lambda *args, **kwargs: below(*args, **kwargs)
    assert not does_nothing_now(unet, attention)


def hacked_basic_transformer_inner_forward(self: Any, x: Tensor, context: Tensor | None = None) -> Tensor:
    return x


def test_what_a_reference_leaves_counts_while_it_records_or_is_about_to(unet: Any) -> None:
    block = transformer_block(unet)
    block._forward = types.MethodType(hacked_basic_transformer_inner_forward, block)
    block.bank = []
    assert does_nothing_now(unet, block)
    block.bank = [torch.zeros(1)]
    assert not does_nothing_now(unet, block)
    block.bank = []
    unet.forward = types.MethodType(lambda self, *args, **kwargs: None, unet)
    assert not does_nothing_now(unet, block)


def test_an_unknown_forward_counts(unet: Any) -> None:
    block = transformer_block(unet)
    block._forward = lambda x, context=None: x
    assert not does_nothing_now(unet, block)


@pytest.mark.parametrize(("path", "name"), [
    ("/webui/extensions/sd-webui-controlnet/scripts/hook.py", "sd-webui-controlnet"),
    ("/webui/extensions-builtin/hypertile/hypertile.py", "hypertile"),
    ("/venv/tomesd/patch.py", "tomesd.patch"), ("/webui/extensions/loose.py", "tomesd.patch"),
])
def test_reasons_name_the_extension_that_users_have_installed(path: str, name: str) -> None:
    space = {"__name__": "tomesd.patch"}
    exec(compile("def function(): pass", path, "exec"), space)
    assert author(types.MethodType(space["function"], object())) == name
    assert author(functools.partial(space["function"])) == name

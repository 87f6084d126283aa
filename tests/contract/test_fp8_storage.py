"""A1111's option "FP8 weight": our forward casts weights in float8 when it uses them, as the WebUI does."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import CONTEXT_WIDTH, relative_error
from contract_hosts import ATTENTION, A1111Host, calls_of, random
from test_generations import BY_HOST, OURS, same
from test_weight_functions import network
from torch import Tensor

from lib_onediff.runtime.runtime import runtime

pytestmark = pytest.mark.parametrize("host", ["a1111"], indirect=True)
FLOAT8 = torch.float8_e4m3fn
STORED = "weights stored as float8_e4m3fn"
LAYERS = (ATTENTION, "input_blocks.1.0.in_layers.2", "input_blocks.1.0.emb_layers.1", "time_embed.0", "out.2")


def parameter_bits(host: A1111Host) -> dict[str, Tensor]:
    """Copies of the UNet's parameters, as bytes."""
    return {name: parameter.clone().flatten().view(torch.uint8) for name, parameter in host.unet.named_parameters()}


def in_float32(host: A1111Host, make: Callable[[], Any]) -> Any:
    """The result of make() while the WebUI casts the stored weights to float32, and rounds nothing else."""
    devices = host.module("modules.devices")
    before = devices.by_hand
    devices.by_hand = True
    try:
        return make()
    finally:
        devices.by_hand = before


@torch.no_grad()
def outputs(host: A1111Host) -> list[Tensor]:
    """The outputs of single UNet calls with several inputs."""
    return [host.checkpoint.apply_model(
        random(2, 4, 8, 8, seed=seed), torch.full((2,), 500.25),
        {"c_crossattn": [random(2, 77, CONTEXT_WIDTH, seed=seed + 1)]},
    ).float() for seed in range(0, 24, 2)]


def mean_error(made: list[Tensor], exact: list[Tensor]) -> float:
    return sum(map(relative_error, made, exact)) / len(exact)


def set_loras(host: A1111Host, *strengths: float) -> None:
    """Use LoRAs of these strengths, which change weights and biases, in the generations to come."""
    networks = host.module("networks")
    parameters = dict(host.unet.named_parameters())
    biases = [f"{name}.bias" for name in LAYERS if f"{name}.bias" in parameters]
    wanted = []
    for seed, strength in enumerate(strengths):
        differences = {name: random(*parameters[f"{name}.weight"].shape, seed=seed) for name in LAYERS}
        differences |= {name: random(*parameters[name].shape, seed=seed + 9) for name in biases}
        wanted.append(networks.network(f"seed {seed}", strength, differences))
    networks.loaded_networks[:] = wanted


def test_our_error_with_fp8_weights_is_not_above_the_hosts_and_no_weight_is_copied(host: A1111Host) -> None:
    """exact: the host's output with the same weights cast to float32. On a CPU, the WebUI calls the UNet in float32,
    and autocast computes its layers in bfloat16. Switched off, the host's image and the weights are the same to the
    bit."""
    host.store_in_fp8(True)
    exact = in_float32(host, lambda: outputs(host))
    expected = outputs(host)
    image = host.generate()
    before = parameter_bits(host)
    host.start()
    made, calls = calls_of(host.generate)
    assert calls == OURS and network(host).weight_marks == (STORED,), runtime.status()["reason"]
    assert network(host).bound.binding.dtype == torch.bfloat16 and made.latent.dtype == torch.float32
    assert same(host.generate(), made)
    ours, calls = calls_of(lambda: outputs(host))
    assert calls == {"plain": len(exact)}
    assert 1e-3 < mean_error(ours, exact) <= mean_error(expected, exact)
    # There is no copy of a weight. Biases are kept in bfloat16, and norms are unchanged.
    small = [parameter for parameter in host.unet.parameters() if parameter.dtype == FLOAT8 and parameter.dim() == 1]
    assert network(host).bound.on_the_fly.bytes == sum(2 * parameter.numel() for parameter in small) > 0
    assert {parameter.dtype for parameter in host.unet.parameters()} == {FLOAT8, torch.float32}
    host.switch(False)
    assert same(host.generate(), image)
    assert all(torch.equal(before[name], now) for name, now in parameter_bits(host).items())


@pytest.mark.parametrize("cache", [False, True], ids=["", "cached in float16"])
def test_loras_that_the_webui_merges_into_fp8_weights_and_removes_are_in_our_images(
    host: A1111Host, cache: bool
) -> None:
    """The biases change too, of which OneDiff keeps copies. Each of our images differs from the host's by less than a
    tenth of a LoRA's effect. cache: the WebUI's option "Cache FP16 weight for LoRA"."""
    host.store_in_fp8(True, cache=cache)
    sequence: tuple[tuple[float, ...], ...] = ((), (0.5,), (0.25, 0.5), (), (0.5,))
    expected: list[tuple[Any, dict[str, Tensor]]] = []
    for strengths in sequence:
        set_loras(host, *strengths)
        expected.append((host.generate(), parameter_bits(host)))
    effect = min(relative_error(expected[index][0].latent, expected[index - 1][0].latent) for index in (1, 2))
    host.start()
    for strengths, (hosts, merged) in zip(sequence, expected, strict=True):
        set_loras(host, *strengths)
        made, calls = calls_of(host.generate)
        assert calls == OURS and relative_error(made.latent, hosts.latent) < effect / 10, runtime.status()["reason"]
        assert all(torch.equal(merged[name], now) for name, now in parameter_bits(host).items())
    host.switch(False)
    assert same(host.generate(), expected[-1][0])


@pytest.mark.parametrize("fp8", [True, False])
def test_the_host_serves_while_it_casts_in_every_layer(host: A1111Host, fp8: bool) -> None:
    """A1111 does so on a GPU with --no-half, and on one on which autocast does not work; the stand-in calls it by_hand.
    Our forward would round differently."""
    host.store_in_fp8(fp8)
    host.module("modules.devices").by_hand = True
    host.generate()
    expected = host.generate()
    host.start()
    made, calls = calls_of(host.generate)
    assert calls == BY_HOST and torch.equal(made.latent, expected.latent)
    assert "the WebUI converts the types of every layer itself" in runtime.status()["reason"]

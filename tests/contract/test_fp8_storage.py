"""A1111's option "FP8 weight" stores the UNet's weights in float8: our forward casts them to bfloat16 at each use, as
A1111 does."""
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
    """The mean relative error of several outputs."""
    return sum(map(relative_error, made, exact)) / len(exact)


def set_loras(host: A1111Host, *strengths: float) -> None:
    """Select one LoRA for each of these strengths, for the next generations. They change weights and biases."""
    networks = host.module("networks")
    parameters = dict(host.unet.named_parameters())
    biases = [f"{name}.bias" for name in LAYERS if f"{name}.bias" in parameters]
    wanted = []
    for seed, strength in enumerate(strengths):
        differences = {name: random(*parameters[f"{name}.weight"].shape, seed=seed) for name in LAYERS}
        differences |= {name: random(*parameters[name].shape, seed=seed + 9) for name in biases}
        wanted.append(networks.network(f"seed {seed}", strength, differences))
    networks.loaded_networks[:] = wanted


def test_our_error_with_fp8_weights_is_at_most_that_of_the_host_and_no_weight_is_copied(host: A1111Host) -> None:
    """Both errors are against the host's output with the same weights cast to float32; the host computes its layers in
    bfloat16, by autocast. After OneDiff is switched off, the host's image and weights equal those before to the bit."""
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
def test_our_images_follow_loras_that_the_webui_merges_into_fp8_weights_and_removes(
    host: A1111Host, cache: bool
) -> None:
    """The LoRAs also change biases, of which OneDiff keeps copies. Each of our latents differs from the host's by less
    than a tenth of a LoRA's effect on the latent. cache: the WebUI's option "Cache FP16 weight for LoRA"."""
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
def test_calls_are_left_to_the_host_while_its_layers_cast_weights_themselves(host: A1111Host, fp8: bool) -> None:
    """A1111's layers do so in place of autocast, on a GPU with --no-half or without a working autocast. Our forward
    would round differently. fp8: whether the weights are stored in float8."""
    host.store_in_fp8(fp8)
    host.module("modules.devices").by_hand = True
    host.generate()
    expected = host.generate()
    host.start()
    made, calls = calls_of(host.generate)
    assert calls == BY_HOST and torch.equal(made.latent, expected.latent)
    assert "the WebUI converts the types of every layer itself" in runtime.status()["reason"]

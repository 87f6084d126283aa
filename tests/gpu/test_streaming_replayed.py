"""Weights that a host keeps in main memory are copied to the GPU while it computes, and edits of them take effect at
the next call."""
from __future__ import annotations

import gc
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from edits_of_modules import EDITS, edited
from gpu_calls import arguments, called, host, last_call
from test_edits_replayed import CLOSE, as_in_images
from torch import nn

import lib_onediff
from lib_onediff.bench.models import random_unet
from lib_onediff.bench.steps import exact_output
from lib_onediff.runtime.network import MOST_ASKED
from lib_onediff.runtime.runtime import runtime
from lib_onediff.runtime.verify import relative_error
from lib_onediff.weights.digests import digest_of_values
from lib_onediff.weights.streaming import RING

GPU = torch.device("cuda")
MAIN = torch.device("cpu")
MIB = 2**20
TRIALS = 150


def to_gpu(layer: nn.Module, given: Any) -> None:
    layer.to(GPU)


def to_main_memory(layer: nn.Module, given: Any, output: Any) -> None:
    layer.to(MAIN)


def kept_in_main_memory(unet: nn.Module, share: float) -> nn.Module:
    """A UNet with a random part of its layers in main memory, each of which is moved to the GPU for its own forward, as
    hosts do it that lack memory. share: the probability for each layer."""
    chance = random.Random(0)
    for layer in unet.modules():
        if layer._parameters and chance.random() < share:
            layer.to(MAIN)
    return moved_for_each_forward(unet)


def moved_for_each_forward(unet: nn.Module) -> nn.Module:
    """Let all layers in main memory be moved to the GPU for their own forward."""
    for layer in unet.modules():
        is_away = any(one is not None and one.device == MAIN for one in layer._parameters.values())
        if is_away and to_gpu not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(to_gpu)
            layer.register_forward_hook(to_main_memory)
    return unet


def compiled_network(unet: nn.Module, **options: Any) -> Any:
    """Compile a UNet, and return its Network. The functions of this file count as the host's, which move weights."""
    lib_onediff.compile_unet(unet, backend="native", **options)
    network = runtime.services.networks.get(unet)
    assert network is not None
    network.bound.host_traits = replace(network.bound.host_traits, movers=(__name__,))
    return network


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("name", ["tiny-sdxl", "sd15"])
def test_streamed_weights_give_the_accuracy_of_the_host_and_uncompile_restores_them(
    share: float, name: str
) -> None:
    """A share of the layers (see kept_in_main_memory) is copied to the GPU while a graph runs. exact: the output in
    float32; our error may be 1.1 times the host's. An edit in main memory changes the next output. After
    uncompile_unet, values are unchanged, and each parameter has its own memory, which is not pinned."""
    unet = random_unet(name, GPU).half()
    given = arguments(unet, 256, 192)
    exact = exact_output(unet, given).to(GPU)
    expected = host(unet, given)
    before = {name: value.clone() for name, value in unet.state_dict().items()}
    kept_in_main_memory(unet, share)
    network = compiled_network(unet)
    with as_in_images():
        for _ in range(5):
            output = called(unet, given)
            assert relative_error(output, exact) <= 1.1 * relative_error(expected, exact)
        status = last_call()
        assert (status["backend"], status["route"]) == ("native", "graph") and "main memory" in status["reason"]
        assert network.bound.streaming.bytes < 2**29
        parameter = next(one for one in unet.parameters() if one.device == MAIN and one.dim() > 1)
        with torch.no_grad():
            parameter.data.mul_(2)
        assert relative_error(called(unet, given), host(unet, given)) < CLOSE
        with torch.no_grad():
            parameter.data.div_(2)
    lib_onediff.uncompile_unet(unet)
    assert all(torch.equal(value.to(GPU), before[name]) for name, value in unet.state_dict().items())
    assert all(one.untyped_storage().nbytes() == one.nbytes and not one.is_pinned() for one in unet.parameters())


@pytest.mark.gpu
def test_the_digest_of_weights_is_the_same_on_the_gpu_and_in_main_memory() -> None:
    """The results of verification are stored under this digest, and must remain valid when the host moves weights."""
    values = [torch.randn(7, device=GPU), torch.randn(5, 3, device=GPU).half(), torch.randn(9, device=GPU)]
    somewhere = [values[0].cpu(), *values[1:]]
    assert digest_of_values("", somewhere) == digest_of_values("", values) != digest_of_values("", values[::-1])


@pytest.mark.gpu
def test_edits_of_weights_in_main_memory_are_in_the_output_of_the_next_call() -> None:
    """Half of the UNet's layers are in main memory. After each of many random edits of any layer, our output is
    compared with the host's."""
    done = 0
    seed = 0
    wrong = []
    while done < TRIALS:
        chance = random.Random(seed)
        unet = kept_in_main_memory(random_unet("tiny-sdxl", GPU).half(), 0.5)
        given = arguments(unet, 128, 128)
        compiled_network(unet)
        with as_in_images():
            for _ in range(4):
                called(unet, given)
            for what in edited(unet, chance, 2 * len(EDITS)):
                done += 1
                moved_for_each_forward(unet)
                if not relative_error(called(unet, given), host(unet, given)) < CLOSE:
                    wrong.append((seed, what, last_call()["route"]))
        lib_onediff.uncompile_unet(unet)
        seed += 1
    assert not wrong


@pytest.mark.gpu
def test_weights_that_are_kept_in_eight_bits_are_not_copied_from_main_memory(option: Any) -> None:
    """With "Low-bit only", the 8-bit weights stay on the GPU, and only the other weights are copied. option: a value of
    the setting low_bit."""
    unet = random_unet("sd15", GPU).half()
    given = arguments(unet, 512, 512)
    expected = host(unet, given)
    network = compiled_network(kept_in_main_memory(unet, 1.0), low_bit=option, low_bit_only=True)
    with as_in_images():
        for _ in range(5):
            output = called(unet, given)
    status = last_call()
    assert "only" in status["lossy"] and status["route"] == "graph", status["reason"]
    assert 1e-3 < relative_error(output, expected) < 0.12
    whole = network.bound.streaming.copied()
    # SD1.5's convolutions are three quarters of its weights.
    assert network.bound.streaming.copied(network.low_bit.names()) < 0.8 * whole


@pytest.mark.gpu
def test_on_a_full_gpu_the_host_frees_memory_until_a_graph_can_stream_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """make_room stands for the host's function that moves weights to main memory. Until it has freed enough, the host
    computes; then a graph does. All outputs are as exact as the host's, compared with float32."""
    unet = random_unet("sd15", GPU).half()
    given = arguments(unet, 256, 192)
    exact = exact_output(unet, given).to(GPU)
    expected = host(unet, given)
    network = compiled_network(kept_in_main_memory(unet, 0.3))
    asked: list[int] = []
    freed: list[int] = []
    routes: list[str] = []

    def make_room(unet: nn.Module, size: int) -> int:
        asked.append(size)
        done = 0
        for layer in unet.modules():
            on_gpu = [one for one in layer._parameters.values() if one is not None and one.is_cuda]
            if done < size and on_gpu:
                done += sum(one.nbytes for one in on_gpu)
                layer.to(MAIN)
        moved_for_each_forward(unet)
        freed.append(done)
        return done

    network.bound.host_traits = replace(network.bound.host_traits, make_room=make_room)
    # OneDiff leaves a GiB of this GPU to others, which most of these weights would have to make room for.
    monkeypatch.setattr(runtime.services.holdings.card, "spare", lambda device: 128 * MIB)
    runtime.room_lacked(unet, "256x192")
    runtime.begin_sampling(unet)
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    # Less than the ring takes.
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 128 * MIB) / total)
    try:
        with as_in_images():
            for _ in range(9):
                output = called(unet, given)
                assert relative_error(output, exact) <= 1.1 * relative_error(expected, exact)
                routes.append(last_call()["route"])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        runtime.end_sampling()
    assert routes[0] == "host" and routes[-1] == "graph", (routes, last_call()["reason"])
    assert "main memory" in last_call()["reason"] and network.bound.streaming is not None
    assert asked[0] >= RING and len(asked) <= MOST_ASKED
    # From its beginning, the next image has this memory, apart from what OneDiff holds already.
    assert runtime.room_lacked(unet, "256x192") + network.bound.bytes >= sum(freed)
    lib_onediff.uncompile_unet(unet)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
def test_a_unet_with_diffusers_group_offloading_is_replayed_and_stays_in_main_memory(kind: str) -> None:
    """Outputs are compared with the host's before offloading. kind: diffusers' offload_type."""
    hooks = pytest.importorskip("diffusers.hooks")
    unet = random_unet("tiny-sdxl", GPU).half()
    given = arguments(unet, 256, 192)
    expected = host(unet, given)
    unet.to(MAIN)
    hooks.apply_group_offloading(unet, GPU, offload_type=kind, num_blocks_per_group=1, use_stream=True)
    lib_onediff.compile_unet(unet, backend="native")
    with as_in_images():
        for _ in range(5):
            assert relative_error(called(unet, given), expected) < CLOSE
    assert last_call()["route"] == "graph", last_call()["reason"]
    assert not any(one.is_cuda for one in unet.parameters())

"""Low-bit only: the weights in the model's type wait in the computer's memory, and are back before anybody uses them.

Both memories are a CPU's here: what tells them apart is which weights were offloaded, and that nobody computes with
those."""
from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from builders import diffusers_arguments, diffusers_output, relative_error, served
from graph_builders import PretendedGraphs
from ladder_builders import Weather, reason
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

pytest.importorskip("triton", reason="needs Triton")

from low_bit_builders import (
    EIGHT,
    EXACT,
    ONLY,
    as_ours,
    compiled,
    entry_of,
    half_call,
    half_unet,
    now,
    use_low_bit,
    watch_offloaded,
)
from streaming_builders import Late, use_lane

import lib_onediff
from lib_onediff.core.call import Call
from lib_onediff.core.settings import Settings
from lib_onediff.core.table import State
from lib_onediff.runtime.managed_unet import ManagedUNet
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights import binding, low_bit, offload
from lib_onediff.weights.fused_storage import shares_storage
from lib_onediff.weights.low_bit import KINDS_OF
from lib_onediff.weights.offload import OffloadedWeights, weights_of

ALONE = {"low_bit": "int8", "low_bit_only": True}
CPU = torch.device("cpu")


def managed(unet: nn.Module) -> ManagedUNet:
    found = runtime.managed_unet(unet)
    assert found is not None
    return found


def offloaded(unet: nn.Module) -> OffloadedWeights:
    return managed(unet).bound.offloaded


def bits(unet: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in unet.state_dict().items()}


def is_unchanged(unet: nn.Module, before: dict[str, Tensor]) -> bool:
    after = unet.state_dict()
    return set(after) == set(before) and all(torch.equal(after[name], value) for name, value in before.items())


def hooks(unet: nn.Module) -> list[Any]:
    return [hook for layer in unet.modules() for hook in layer._forward_pre_hooks.values()]


@pytest.fixture
def on_a_gpu(weather: Weather, pretended: PretendedGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with INT8 and FP8, on which nobody computes with a weight that was offloaded."""
    use_low_bit(monkeypatch)
    watch_offloaded(monkeypatch)
    use_lane(monkeypatch, Late)
    monkeypatch.setattr(binding, "lies_away", lies_in_main_memory)


def lies_in_main_memory(parameter: Tensor, device: torch.device) -> bool:
    bounds = [managed.bound for managed in runtime.services.managed.values()]
    moved = (weight for one in bounds for kept in one.offloaded._layers.values() for weight in weights_of(kept))
    return any(weight is parameter for weight in moved)


def host_over(unet: nn.Module, call: Call) -> Tensor:
    """The host's forward over the weights that it was given, laid out as this UNet's are now: after calls of ours a
    convolution's are channels-last, and some processors round those otherwise (rounds_by_layout)."""
    fresh = half_unet()
    for own, kept in zip(fresh.parameters(), unet.parameters(), strict=True):
        own.data = torch.empty_strided(kept.shape, kept.stride(), dtype=own.dtype).copy_(own.data)
    return diffusers_output(fresh, call)


@pytest.fixture(autouse=True)
def rounds_by_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that rounds a convolution over channels-last weights otherwise than over others, as a Zen 5 does in
    float16: what is bit for bit the same here is so on any."""
    real = functional.conv2d

    def conv2d(image: Tensor, weight: Tensor, *more: Any, **named: Any) -> Tensor:
        output = real(image, weight, *more, **named)
        only_last = weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
        return output * (1 + torch.finfo(output.dtype).eps) if only_last else output

    monkeypatch.setattr(functional, "conv2d", as_ours(conv2d))


@pytest.fixture
def unet(on_a_gpu: None) -> nn.Module:
    return lib_onediff.compile_unet(half_unet(), **ALONE)


def twice(unet: nn.Module, call: Call) -> Tensor:
    """The first call of a shape is checked, which takes the host's weights."""
    served(unet, call)
    output = served(unet, call)
    return output


# --- what it takes, and what it computes ------------------------------------------------------------------------------


@pytest.mark.parametrize("option", KINDS_OF)
def test_it_computes_what_rounded_weights_beside_the_hosts_do(on_a_gpu: None, option: str) -> None:
    """The keys' and values' weights, which are multiplied in the model's type, are rounded in the oracle itself."""
    unet = lib_onediff.compile_unet(half_unet(), low_bit=option, low_bit_only=True)
    call = half_call(unet)
    before, host = bits(unet), diffusers_output(unet, call)
    output = twice(unet, call)
    assert now()[0] == ONLY, reason()
    oracle, kind = half_unet(), KINDS_OF[option][-1]
    with torch.no_grad():
        for name, layer in oracle.named_modules():
            if name.endswith("attn2"):
                # As one weight.
                both = torch.cat([layer.to_k.weight, layer.to_v.weight])
                values, scales = low_bit.empty_like(both, kind)
                runtime.devices.lossy.low_bit.quantizer()(both, values, scales)
                halves = values.half().mul_(scales.t()).chunk(2)
                for part, rounded in zip((layer.to_k, layer.to_v), halves, strict=True):
                    part.weight.copy_(rounded)
    expected = served(compiled(oracle, option), call)
    assert now()[0] == EIGHT, reason()
    assert torch.equal(output, expected)
    assert 1e-3 < relative_error(output, host) < 0.12
    assert is_unchanged(unet, before), "who saves the model saves the original"


# --- the host finds its weights ---------------------------------------------------------------------------------------


def test_switched_off_the_weights_are_where_they_were(unet: nn.Module) -> None:
    call, before = half_call(unet), bits(unet)
    expected = diffusers_output(unet, call)
    exact = twice(lib_onediff.compile_unet(half_unet(), **ALONE), call)
    twice(unet, call)
    for settings, backend in ((Settings(low_bit="int8"), EIGHT), (Settings(), EXACT)):
        with runtime.settings_for_run(settings):
            served(unet, call)
            assert now()[0] == backend and not offloaded(unet), reason()
            assert bool(runtime.totals().low_bit) is (backend == EIGHT) and runtime.totals().offloaded == 0
        assert torch.equal(served(unet, call), exact) and now()[0] == ONLY
    with runtime.settings_for_run(Settings(enabled=False)):
        assert torch.equal(served(unet, call), host_over(unet, call)) and not offloaded(unet)
    served(unet, call)
    lib_onediff.uncompile_unet(unet)
    assert torch.equal(diffusers_output(unet, call), expected) and is_unchanged(unet, before)
    assert not hooks(unet) and not any(map(shares_storage, unet.parameters()))


# --- the host changes its weights -------------------------------------------------------------------------------------


def other_weights(unet: nn.Module, factor: float) -> dict[str, Tensor]:
    return {name: value * factor if "ff.net" in name else value for name, value in bits(unet).items()}


def test_weights_that_change_in_a_sampling_are_rounded_again_where_the_old_were(unet: nn.Module) -> None:
    call = half_call(unet)
    with lib_onediff.sampling(unet):
        before = twice(unet, call)
        served(unet, call)
        addresses = {name: kept.values.data_ptr() for name, kept in managed(unet).low_bit._kept.items()}
        unet.load_state_dict(other_weights(unet, 1.5))
        assert offloaded(unet), "they are changed in the computer's memory"
        output = served(unet, call)
    assert now() == (ONLY, "graph"), "the graph knows where the rounded ones lie"
    assert {name: kept.values.data_ptr() for name, kept in managed(unet).low_bit._kept.items()} == addresses
    other = half_unet()
    other.load_state_dict(other_weights(other, 1.5))
    assert torch.equal(output, twice(lib_onediff.compile_unet(other, **ALONE), call))
    assert relative_error(output, before) > 0.1


def test_a_merge_that_counts_no_edit_is_seen(unet: nn.Module) -> None:
    """As peft merges a LoRA."""
    twice(unet, half_call(unet))
    for name, parameter in unet.named_parameters():
        if "ff.net.2.weight" in name:
            versions = parameter._version
            parameter.data += 0.5 * parameter.data
            assert parameter._version == versions
    call = half_call(unet, seed=1)
    output = twice(unet, call)
    assert now()[0] == ONLY and offloaded(unet), reason()
    other = half_unet()
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "ff.net.2.weight" in name:
                parameter += 0.5 * parameter
    assert torch.equal(output, twice(lib_onediff.compile_unet(other, **ALONE), call))


def test_a_lora_beside_the_layers_is_rounded_with_their_weights(unet: nn.Module) -> None:
    peft = pytest.importorskip("peft")
    before = twice(unet, half_call(unet))
    unet.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "ff.net.2"], init_lora_weights=False))
    call, merged = half_call(unet, seed=1), half_unet()
    merged.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "ff.net.2"], init_lora_weights=False))
    merged.load_state_dict(unet.state_dict())
    merged.fuse_lora()
    merged.unload_lora()
    assert relative_error(twice(unet, call), twice(lib_onediff.compile_unet(merged, **ALONE), call)) < 1e-2  # in float16
    assert relative_error(served(unet, call), diffusers_output(unet, call)) < 0.12
    assert now()[0] == ONLY and offloaded(unet), reason()
    twice(unet, call)
    unet.set_adapters(["default"], [0.5])
    assert relative_error(twice(unet, call), diffusers_output(unet, call)) < 0.12
    unet.unload_lora()
    assert torch.equal(twice(unet, half_call(unet)), before) and offloaded(unet), reason()


def test_a_copy_is_a_model_of_its_own(unet: nn.Module) -> None:
    call = half_call(unet)
    twice(unet, call)
    copied = copy.deepcopy(unet)
    file = io.BytesIO()
    torch.save(unet, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copied, loaded):
        expected = host_over(other, call)
        assert torch.equal(diffusers_output(other, call), expected)
        with torch.no_grad():
            assert torch.equal(other(**diffusers_arguments(call)).sample, expected)
    assert offloaded(unet) and is_unchanged(loaded, bits(unet))
    lib_onediff.compile_unet(copied)
    served(copied, call)
    assert now()[0] == EXACT, "a hook of ours is no patch of somebody's"


# --- there is no room -------------------------------------------------------------------------------------------------


def fails_at(count: int, error: Exception, real: Any) -> Any:
    """As real, but for one call."""
    calls: list[int] = []

    def work(*given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == count:
            raise error
        return real(*given, **named)

    return work


def test_a_fault_midway_leaves_everything_where_it_was(unet: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    call, before = half_call(unet), bits(unet)
    expected = diffusers_output(unet, call)
    monkeypatch.setattr(offload, "move", fails_at(9, RuntimeError("a cable is loose"), offload.move))
    output = served(unet, call)
    entry = entry_of("int8", only=True)
    assert entry.state is State.FAILED and "a cable is loose" in entry.reason
    assert now()[0] == EIGHT and relative_error(output, expected) < 0.04
    assert not offloaded(unet) and not hooks(unet) and is_unchanged(unet, before)


def test_weights_that_find_no_room_for_their_return_are_not_lost(
    unet: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, before = half_call(unet), bits(unet)
    for _ in range(3):
        served(unet, call)
    assert now() == (ONLY, "graph")
    whole, freed = OffloadedWeights.restore, []

    def real(weights: OffloadedWeights, module: nn.Module) -> None:
        assert managed(unet).low_bit is None, "those in eight bits make room for them"
        whole(weights, module)

    monkeypatch.setattr(runtime.services.graphs, "free", lambda: freed.append(1))
    full = torch.cuda.OutOfMemoryError("CUDA out of memory")
    with monkeypatch.context() as patch:
        patch.setattr(OffloadedWeights, "restore", fails_at(1, full, real))
        output = diffusers_output(unet, call)
        assert torch.equal(output, host_over(unet, call)) and freed, "without any graph there is room"
    for _ in range(2):
        served(unet, call)
    with monkeypatch.context() as patch:

        def never(*given: Any) -> None:
            raise full

        patch.setattr(OffloadedWeights, "restore", never)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            diffusers_output(unet, call)
        with pytest.raises(torch.cuda.OutOfMemoryError), runtime.settings_for_run(Settings(enabled=False)):
            served(unet, call)
        assert offloaded(unet)
    assert torch.equal(diffusers_output(unet, call), host_over(unet, call)) and is_unchanged(unet, before)


# --- where it rests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "said"), [
    ({"second_gpu": "1"}, "one GPU"), ({"low_bit": "off"}, ""), ({}, "accelerate"),
    ({"backend": "cudagraph"}, "needs the native backend"),
])
def test_it_says_why_the_weights_stay(on_a_gpu: None, options: dict[str, Any], said: str) -> None:
    unet = lib_onediff.compile_unet(half_unet(), **{**ALONE, **options})
    if said == "accelerate":
        unet._hf_hook = object()
    call = half_call(unet)
    served(unet, call)
    assert now()[0] != ONLY and said in reason() and not offloaded(unet)


def test_weights_that_others_want_again_and_again_stay(unet: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    call = half_call(unet)
    twice(unet, call)
    for _ in range(offload.MANY_TIMES):
        diffusers_output(unet, call)
        served(unet, call)
    assert now()[0] == EIGHT and "again and again" in reason() and not offloaded(unet)
    monkeypatch.setattr(offload, "SECONDS_OF_MANY", 0.0)
    served(unet, call)
    assert now()[0] == ONLY, reason()


def test_an_unloaded_model_leaves_nothing_behind(on_a_gpu: None) -> None:
    unet = lib_onediff.compile_unet(half_unet(), **ALONE)
    twice(unet, half_call(unet))
    there = [StorageWeakRef(parameter.untyped_storage()) for parameter in unet.parameters()]
    assert runtime.totals().low_bit and runtime.totals().offloaded
    del unet
    gc.collect()
    assert runtime.totals().low_bit == runtime.totals().offloaded == 0
    assert all(storage.expired() for storage in there)

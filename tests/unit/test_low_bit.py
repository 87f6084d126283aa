"""Low-bit: whole UNets by it, and what becomes of it where weights, memory, settings or the machine change."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import SMALL_XL, a_call, diffusers_output, diffusers_unet, relative_error, served
from graph_builders import PretendedGraphs
from ladder_builders import Weather, entry_of, now, reason
from torch import Tensor, nn

pytest.importorskip("triton", reason="needs Triton")

from low_bit_builders import fewest_weights, use_low_bit

import lib_onediff
from lib_onediff.engines import CUDAGRAPH, FLOAT8, INT8, LOW_BIT, LOW_BIT_BACKENDS, NATIVE, Candidates, with_low_bit
from lib_onediff.model import low_bit
from lib_onediff.model import low_bit as kinds
from lib_onediff.ops import torch_ops
from lib_onediff.ops.quantized import int8_mm, kernels, scaled_mm
from lib_onediff.ops.quantized import support as int8_support
from lib_onediff.ops.quantized.gains import Product, ProductChoice, choice_name, products
from lib_onediff.ops.triton.launch_config import Launches
from lib_onediff.ops.tuning_cache import TuningCache
from lib_onediff.options.settings import Settings
from lib_onediff.runtime.runtime import runtime
from lib_onediff.shapes.table import State

CPU = torch.device("cpu")


def half_unet(seed: int = 0) -> nn.Module:
    return diffusers_unet(seed, **{**SMALL_XL, "norm_num_groups": 2}).half()


def half_call(unet: nn.Module, height: int = 4, width: int = 4, seed: int = 0) -> Any:
    call = a_call(unet, height, width, 1, 5, seed)
    parts = {name: getattr(call, name).half() for name in ("latent", "context", "y")}
    return replace(call, **parts)


@pytest.fixture
def on_a_gpu(weather: Weather, pretended: PretendedGraphs, monkeypatch: pytest.MonkeyPatch) -> Weather:
    """A machine that has FP8; weather is what native does."""
    use_low_bit(monkeypatch)
    return weather


def test_a_unet_in_float8_is_near_the_hosts_and_not_the_same(on_a_gpu: Weather) -> None:
    unet = lib_onediff.compile_unet(half_unet(), low_bit="fp8")
    call = half_call(unet)
    host = diffusers_output(unet, call)
    error = relative_error(served(unet, call), host)
    assert now()[0] == FLOAT8, reason()
    assert 1e-3 < error < 0.12, "three bits of every factor"
    assert entry_of(FLOAT8).relative_error == pytest.approx(error, rel=0.05), "what the panel shows"
    served(unet, call)
    served(unet, call)
    assert now() == (FLOAT8, "graph")


def test_the_layers_are_those_that_are_worth_it() -> None:
    layout = runtime.layout_of(lib_onediff.compile_unet(diffusers_unet(**SMALL_XL)))
    assert list(low_bit.float8_layers(layout)) == [], "too small"


def test_the_query_of_the_cross_attention_and_the_outputs_of_attention_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    fewest_weights(monkeypatch, 0)
    layout = runtime.layout_of(lib_onediff.compile_unet(diffusers_unet(**SMALL_XL)))
    names = [low_bit.name_of(layer) for layer in low_bit.float8_layers(layout)]
    assert names and all("ff.net" in name or "attn1" in name for name in names)
    assert not any("to_out" in name or "attn2" in name for name in names)


def test_an_edit_of_a_weight_is_rounded_anew_where_the_old_was(on_a_gpu: Weather) -> None:
    unet = lib_onediff.compile_unet(half_unet(), low_bit="fp8")
    call = half_call(unet)
    before = served(unet, call)
    kept = runtime.managed_unet(unet).float8
    addresses = {name: weight.values.data_ptr() for name, weight in kept._kept.items()}
    with torch.no_grad():
        for name, parameter in unet.named_parameters():
            if "ff.net" in name:
                parameter.mul_(1.5)
    assert relative_error(served(unet, call), before) > 0.1
    for name, weight in runtime.managed_unet(unet).binding_for(FLOAT8).weights().items():
        if weight.float8 is not None:
            back = weight.float8.values.float() * weight.float8.scales.t()
            assert relative_error(back.half(), weight.weight) < 0.05, name
    assert {name: weight.values.data_ptr() for name, weight in kept._kept.items()} == addresses, "graphs know those"


def test_what_has_not_changed_is_not_rounded_again(on_a_gpu: Weather, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded: list[int] = []
    real = kernels.rounded_rows
    monkeypatch.setattr(kernels, "rounded_rows", lambda *given: (rounded.append(1), real(*given))[1])
    unet = lib_onediff.compile_unet(half_unet(), low_bit="fp8")
    served(unet, half_call(unet))
    first = len(rounded)
    assert first >= 6
    served(unet, half_call(unet, seed=1))
    served(unet, half_call(unet, 4, 6))
    assert len(rounded) == first


def test_switching_it_off_gives_the_memory_back(on_a_gpu: Weather) -> None:
    unet = lib_onediff.compile_unet(half_unet(), low_bit="fp8")
    call = half_call(unet)
    for _ in range(3):
        served(unet, call)
    assert now() == (FLOAT8, "graph") and runtime.totals().float8 > 0
    with runtime.settings_for_run(Settings()):
        served(unet, call)
        assert now()[0] == NATIVE
    assert runtime.totals().float8 == 0 and entry_of(FLOAT8).state is State.PROVED
    served(unet, call)
    assert now() == (FLOAT8, "plain"), "its graph knew where the weights lay"
    assert relative_error(served(unet, call), diffusers_output(unet, call)) < 0.12


def test_without_memory_for_it_native_serves_and_says_why(on_a_gpu: Weather, monkeypatch: pytest.MonkeyPatch) -> None:
    unet, tries = lib_onediff.compile_unet(half_unet(), low_bit="fp8"), []

    def full(weight: Tensor) -> Any:
        tries.append(1)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(low_bit, "empty_like", full)
        for _ in range(2):
            served(unet, half_call(unet))
            assert now()[0] == NATIVE and "no GPU memory for the weights in FP8" in reason()
    assert len(tries) == 1, "not at every step"
    runtime.begin_sampling(unet)
    served(unet, half_call(unet))
    assert now()[0] == FLOAT8, reason()


def test_what_is_too_far_from_the_host_is_not_used(on_a_gpu: Weather, monkeypatch: pytest.MonkeyPatch) -> None:
    real = float8.product
    monkeypatch.setattr("lib_onediff.ops.quantized.operators.product", lambda *given: 3 * real(*given))
    unet = lib_onediff.compile_unet(half_unet(), low_bit="fp8")
    call = half_call(unet)
    output = served(unet, call)
    assert torch.equal(output, diffusers_output(unet, call)), "the first picture is the host's"
    assert entry_of(FLOAT8).state is State.FAILED and "it differs" in entry_of(FLOAT8).reason
    served(unet, call)
    assert now()[0] == NATIVE and "it differs" in reason()


# --- where it cannot be -----------------------------------------------------------------------------------------------


def test_steps_with_and_without_it() -> None:
    gpu, other = Candidates((NATIVE, CUDAGRAPH), ""), Candidates((CUDAGRAPH,), "there is no Triton")
    assert with_float8(gpu, lambda: None) == Candidates((FLOAT8, NATIVE, CUDAGRAPH), "")
    assert with_float8(gpu, lambda: "too old") == Candidates((NATIVE, CUDAGRAPH), "too old")
    assert "there is no Triton" in with_float8(other, lambda: None).reason
    assert "native backend" in with_float8(Candidates((CUDAGRAPH,), ""), lambda: None).reason


def test_a_model_in_float32_says_why_not(on_a_gpu: Weather) -> None:
    whole = lib_onediff.compile_unet(diffusers_unet(**SMALL_XL), low_bit="fp8")
    served(whole, a_call(whole))
    assert now()[0] == NATIVE and "this one is in float32" in reason()


def test_a_small_model_says_that_it_gains_nothing(on_a_gpu: Weather, monkeypatch: pytest.MonkeyPatch) -> None:
    fewest_weights(monkeypatch, 1 << 20)
    unet = lib_onediff.compile_unet(half_unet(), low_bit="fp8")
    served(unet, half_call(unet))
    assert now()[0] == NATIVE and "too small to gain by FP8" in reason()


def test_where_no_product_was_measured_to_gain_native_serves(on_a_gpu: Weather) -> None:
    unet = lib_onediff.compile_unet(half_unet(), low_bit="fp8")
    call = half_call(unet)
    served(unet, call)
    layout, (batch, _, height, width) = runtime.layout_of(unet), call.latent.shape
    every = set(products(layout, height, width, batch))
    assert len(every) == 3 and {one.gated for one in every} == {True, False}
    first, *others = sorted(every)
    for one in others:
        runtime.operators.float8.measure(one, torch.float16, lambda: 1, lambda: 2, lambda work: float(work()))
    served(unet, call)
    assert now()[0] == FLOAT8, "one is not known yet"
    runtime.operators.float8.measure(first, torch.float16, lambda: 1, lambda: 2, lambda work: float(work()))
    served(unet, call)
    assert now()[0] == NATIVE and "(measured)" in reason()
    runtime.operators.float8.measure(first, torch.float16, lambda: 2, lambda: 1, lambda work: float(work()))
    served(unet, call)
    assert now()[0] == FLOAT8


def test_only_what_pays_is_done_in_float8(on_a_gpu: Weather, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    real = float8.product
    monkeypatch.setattr("lib_onediff.ops.quantized.operators.product", lambda *given: (done.append(1), real(*given))[1])
    unet = lib_onediff.compile_unet(half_unet(), low_bit="fp8", verify=False)
    call = half_call(unet)
    served(unet, call)
    every, only_gated = len(done), Float8Operators(
        Launches(TuningCache()), torch_ops.attention, lambda device, dtype: dtype, lambda product, dtype: product.gated
    )
    monkeypatch.setitem(runtime.operators._made, FLOAT8, only_gated)
    done.clear()
    served(unet, half_call(unet, 4, 6))
    assert len(done) * 3 == every, "of the three products of a block one comes after a GEGLU"


def test_what_was_measured_is_known_to_the_next_process() -> None:
    product, tuning_cache = Product(8, 16, 32, True), TuningCache()
    assert Float8Choice(tuning_cache).pays(product, torch.float16) is False, "small"
    assert Float8Choice(tuning_cache).pays(Product(2048, 1280, 10240, False), torch.float16) is True
    assert Float8Choice(tuning_cache).pays(Product(2048, 5120, 1280, True), torch.float16) is False, "after a GEGLU"
    Float8Choice(tuning_cache).measure(product, torch.float16, lambda: 2, lambda: 1, lambda work: float(work()))
    assert Float8Choice(tuning_cache).pays(product, torch.float16) is True
    tuning_cache.set(choice_name(product, torch.float16), "nonsense")
    assert Float8Choice(tuning_cache).pays(product, torch.float16) is False


@pytest.mark.parametrize(("capability", "has"), [((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)])
def test_which_gpus_have_it(capability: tuple[int, int], has: bool) -> None:
    sentence = float8.too_old(capability, "RTX 3090")
    assert (sentence is None) == has
    assert has or "8.6" in sentence and "8.9" in sentence and "RTX 3090" in sentence


def test_the_probe_believes_no_wrong_product(monkeypatch: pytest.MonkeyPatch) -> None:
    assert float8.support(CPU, torch.float16).result in (torch.float16, torch.bfloat16)
    monkeypatch.setattr(float8, "product", lambda tokens, weight, bias, result: torch.zeros(64, 128, device=CPU))
    found = float8.support(CPU, torch.float16)
    assert found.result is None and "wrong by" in found.reason

    def missing(*given: Any) -> Tensor:
        raise RuntimeError("not compiled in\nat line 3")

    monkeypatch.setattr(float8, "product", missing)
    found = float8.support(CPU, torch.float16)
    assert found.result is None and "not compiled in" in found.reason and "\n" not in found.reason


def test_where_only_bfloat16_comes_out_the_output_is_still_the_models(
    on_a_gpu: Weather, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_low_bit(monkeypatch, torch.bfloat16)
    unet = lib_onediff.compile_unet(half_unet(), low_bit="fp8")
    call = half_call(unet)
    assert relative_error(served(unet, call), diffusers_output(unet, call)) < 0.12
    assert now()[0] == FLOAT8, reason()

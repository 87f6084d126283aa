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
from lib_onediff.engines.low_bit import LowBit
from lib_onediff.model import low_bit
from lib_onediff.model.forward import transformer_blocks
from lib_onediff.model.low_bit import FP8, GATED, NORMED, PLAIN
from lib_onediff.model.low_bit import INT8 as INT8_KIND
from lib_onediff.ops.quantized import int8_mm, kernels, scaled_mm
from lib_onediff.ops.quantized import support as int8_support
from lib_onediff.ops.quantized.gains import Product, ProductChoice, choice_name, products
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
    """A machine that has FP8 and INT8; weather is what native does."""
    use_low_bit(monkeypatch)
    return weather


@pytest.mark.parametrize(("option", "worst"), [("fp8", 0.12), ("int8", 0.04), ("auto", 0.04)])
def test_a_unet_in_eight_bits_is_near_the_hosts_and_not_the_same(
    on_a_gpu: Weather, option: str, worst: float
) -> None:
    unet, backend = lib_onediff.compile_unet(half_unet(), low_bit=option), LOW_BIT_BACKENDS[option]
    call = half_call(unet)
    host = diffusers_output(unet, call)
    error = relative_error(served(unet, call), host)
    assert now()[0] == backend, reason()
    assert 1e-3 < error < worst, "of every factor float8 keeps three bits, int8 seven of the largest of its row"
    assert entry_of(backend).relative_error == pytest.approx(error, rel=0.05), "what the panel shows"
    served(unet, call)
    served(unet, call)
    assert now() == (backend, "graph")


def test_int8_is_nearer_to_float32_than_float8(on_a_gpu: Weather) -> None:
    unet = half_unet()
    call = half_call(unet)
    wide = replace(call, **{name: getattr(call, name).float() for name in ("latent", "context", "y")})
    exact = diffusers_output(half_unet().float(), wide)
    errors = {}
    for option in ("off", "fp8", "int8"):
        errors[option] = relative_error(served(lib_onediff.compile_unet(unet, low_bit=option), call).float(), exact)
    assert now()[0] == INT8, reason()
    assert errors["off"] < errors["int8"] < min(errors["fp8"] / 2, 0.04), errors


def test_the_layers_are_those_that_are_worth_it(on_a_gpu: Weather, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = runtime.layout_of(lib_onediff.compile_unet(diffusers_unet(**SMALL_XL)))
    sources = {name: product.source for name, product in products(layout, 4, 4, 1)}
    fewest_weights(monkeypatch, 1 << 20)
    assert list(products(layout, 4, 4, 1)) == [], "too small"
    blocks = list(transformer_blocks(layout, 4, 4))
    assert len(sources) == 6 * len(blocks)
    ends = {"ff.net.2": GATED, "ff.net.0.proj": NORMED, "to_q": NORMED, "to_out.0": PLAIN}
    for name, source in sources.items():
        known = [one for end, one in ends.items() if name.endswith(end)] or [NORMED]
        assert source == known[0], name
    assert not any("attn2" in name and name.endswith(("to_k", "to_v")) for name in sources), "once in a generation"


def test_another_kind_takes_the_place_of_the_first(on_a_gpu: Weather) -> None:
    unet = lib_onediff.compile_unet(half_unet(), low_bit="fp8")
    call = half_call(unet)
    served(unet, call)
    held = runtime.totals().low_bit
    with runtime.settings_for_run(Settings(low_bit="int8")):
        served(unet, call)
        assert now()[0] == INT8, reason()
        assert held < runtime.totals().low_bit < 1.5 * held, "not those of both; int8 has a scale for every row"
    served(unet, call)
    assert now()[0] == FLOAT8 and runtime.managed_unet(unet).low_bit.kinds() == {FP8}


@pytest.mark.parametrize("option", ["fp8", "int8"])
def test_an_edit_of_a_weight_is_rounded_anew_where_the_old_was(on_a_gpu: Weather, option: str) -> None:
    unet = lib_onediff.compile_unet(half_unet(), low_bit=option)
    call = half_call(unet)
    before = served(unet, call)
    kept = runtime.managed_unet(unet).low_bit
    addresses = {name: weight.values.data_ptr() for name, weight in kept._kept.items()}
    with torch.no_grad():
        for name, parameter in unet.named_parameters():
            if "ff.net" in name:
                parameter.mul_(1.5)
    assert relative_error(served(unet, call), before) > 0.1
    for name, weight in runtime.managed_unet(unet).binding_for(LOW_BIT_BACKENDS[option]).weights().items():
        for rounded in weight.low_bit:
            back = rounded.values.float() * rounded.scales.t()
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


def test_what_another_size_wants_is_rounded_beside_what_is_there(on_a_gpu: Weather) -> None:
    unet = lib_onediff.compile_unet(half_unet(), low_bit="int8")
    choice = runtime.operators.low_bit.choice
    call, larger = half_call(unet), half_call(unet, 8, 8)
    layout = runtime.layout_of(unet)
    for _, one in products(layout, 4, 4, 1):
        if one.source != GATED:
            choice.measure(one, torch.float16, INT8_KIND, lambda: 1, lambda: 2, lambda work: float(work()))
    served(unet, call)
    few = runtime.managed_unet(unet).low_bit
    before, addresses = few.bytes, {key: kept.values.data_ptr() for key, kept in few._kept.items()}
    assert all(name.endswith("ff.net.2") for name, _ in addresses), "what gains nothing takes no memory"
    served(unet, larger)
    assert runtime.managed_unet(unet).low_bit is few and few.bytes > before
    assert {key: few._kept[key].values.data_ptr() for key in addresses} == addresses, "graphs know those"


def test_switching_it_off_gives_the_memory_back(on_a_gpu: Weather) -> None:
    unet = lib_onediff.compile_unet(half_unet(), low_bit="fp8")
    call = half_call(unet)
    for _ in range(3):
        served(unet, call)
    assert now() == (FLOAT8, "graph") and runtime.totals().low_bit > 0
    with runtime.settings_for_run(Settings()):
        served(unet, call)
        assert now()[0] == NATIVE
    assert runtime.totals().low_bit == 0 and entry_of(FLOAT8).state is State.PROVED
    served(unet, call)
    assert now() == (FLOAT8, "plain"), "its graph knew where the weights lay"
    assert relative_error(served(unet, call), diffusers_output(unet, call)) < 0.12


def test_without_memory_for_it_native_serves_and_says_why(on_a_gpu: Weather, monkeypatch: pytest.MonkeyPatch) -> None:
    unet, tries = lib_onediff.compile_unet(half_unet(), low_bit="fp8"), []

    def full(*given: Any) -> Any:
        tries.append(1)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(low_bit, "empty_like", full)
        for _ in range(2):
            served(unet, half_call(unet))
            assert now()[0] == NATIVE and "no GPU memory for the weights in eight bits" in reason()
    assert len(tries) == 1, "not at every step"
    runtime.begin_sampling(unet)
    served(unet, half_call(unet))
    assert now()[0] == FLOAT8, reason()


@pytest.mark.parametrize("which", [(scaled_mm, "fp8", FLOAT8), (int8_mm, "int8", INT8)], ids=["fp8", "int8"])
def test_what_is_too_far_from_the_host_is_not_used(
    on_a_gpu: Weather, monkeypatch: pytest.MonkeyPatch, which: Any
) -> None:
    module, option, backend = which
    real = module.product
    monkeypatch.setattr(module, "product", lambda *given: 3 * real(*given))
    unet = lib_onediff.compile_unet(half_unet(), low_bit=option)
    call = half_call(unet)
    output = served(unet, call)
    assert torch.equal(output, diffusers_output(unet, call)), "the first picture is the host's"
    assert entry_of(backend).state is State.FAILED and "it differs" in entry_of(backend).reason
    served(unet, call)
    assert now()[0] == NATIVE and "it differs" in reason()


# --- where it cannot be -----------------------------------------------------------------------------------------------


def test_steps_with_and_without_it() -> None:
    gpu, other = Candidates((NATIVE, CUDAGRAPH), ""), Candidates((CUDAGRAPH,), "there is no Triton")
    for option, backend in (("fp8", FLOAT8), ("int8", INT8), ("auto", LOW_BIT)):
        assert with_low_bit(gpu, option, lambda: None) == Candidates((backend, NATIVE, CUDAGRAPH), "")
    assert with_low_bit(gpu, "fp8", lambda: "too old") == Candidates((NATIVE, CUDAGRAPH), "too old")
    assert "there is no Triton" in with_low_bit(other, "int8", lambda: None).reason
    assert "native backend" in with_low_bit(Candidates((CUDAGRAPH,), ""), "auto", lambda: None).reason


@pytest.mark.parametrize("option", LOW_BIT_BACKENDS)
def test_a_model_in_float32_says_why_not(on_a_gpu: Weather, option: str) -> None:
    whole = lib_onediff.compile_unet(diffusers_unet(**SMALL_XL), low_bit=option)
    served(whole, a_call(whole))
    assert now()[0] == NATIVE and "this one is in float32" in reason()


def test_a_small_model_says_that_it_gains_nothing(on_a_gpu: Weather, monkeypatch: pytest.MonkeyPatch) -> None:
    fewest_weights(monkeypatch, 1 << 20)
    unet = lib_onediff.compile_unet(half_unet(), low_bit="fp8")
    served(unet, half_call(unet))
    assert now()[0] == NATIVE and "too small to gain by FP8" in reason()


def measured(product: Product, kind: low_bit.Kind, plain: float, rounded: float) -> None:
    runtime.operators.low_bit.choice.measure(
        product, torch.float16, kind, lambda: plain, lambda: rounded, lambda work: float(work())
    )


def test_where_no_product_was_measured_to_gain_native_serves(on_a_gpu: Weather) -> None:
    unet = lib_onediff.compile_unet(half_unet(), low_bit="fp8")
    call = half_call(unet)
    served(unet, call)
    layout, (batch, _, height, width) = runtime.layout_of(unet), call.latent.shape
    every = {product for _, product in products(layout, height, width, batch)}
    assert {one.source for one in every} == {NORMED, GATED, PLAIN}
    first, *others = sorted(every)
    for one in others:
        measured(one, FP8, 1, 2)
    served(unet, call)
    assert now()[0] == FLOAT8, "one is not known yet"
    measured(first, FP8, 1, 2)
    served(unet, call)
    assert now()[0] == NATIVE and "gain nothing by FP8 on this machine (measured)" in reason()
    measured(first, FP8, 2, 1)
    served(unet, call)
    assert now()[0] == FLOAT8


def test_only_what_pays_is_done_in_eight_bits(on_a_gpu: Weather, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[int, ...]] = []
    real = scaled_mm.product
    monkeypatch.setattr(
        scaled_mm, "product", lambda *given: (done.append(tuple(given[1].values.shape)), real(*given))[1]
    )
    unet = lib_onediff.compile_unet(half_unet(), low_bit="fp8", verify=False)
    call = half_call(unet)
    served(unet, call)
    every = {product for _, product in products(runtime.layout_of(unet), 4, 4, 1)}
    assert set(done) == {(one.out, one.width) for one in every}
    for one in every:
        measured(one, FP8, 2, 1 if one.source == GATED else 2)
    done.clear()
    served(unet, call)
    assert set(done) == {(one.out, one.width) for one in every if one.source == GATED}


def test_everywhere_means_every_layer_of_a_small_model_whatever_it_gains(
    on_a_gpu: Weather, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewest_weights(monkeypatch, 1 << 20)
    unet = lib_onediff.compile_unet(half_unet(), low_bit="fp8", verify=False)
    with runtime.operators.low_bit.choice.used_everywhere():
        served(unet, half_call(unet))
        assert now()[0] == FLOAT8, reason()
    assert not runtime.operators.low_bit.choice.everywhere
    layout = runtime.layout_of(unet)
    kept = runtime.managed_unet(unet).low_bit._kept
    assert {name for name, _ in kept} == {name for name, _ in products(layout, 4, 4, 1, 0)} != set()


def test_auto_takes_for_each_product_what_was_measured_to_be_faster(
    on_a_gpu: Weather, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: dict[str, set[tuple[int, ...]]] = {"fp8": set(), "int8": set()}
    eight, integers = scaled_mm.product, int8_mm.product

    def noted(name: str, real: Any) -> Any:
        return lambda *given: (done[name].add(tuple(given[1].values.shape)), real(*given))[1]

    monkeypatch.setattr(scaled_mm, "product", noted("fp8", eight))
    monkeypatch.setattr(int8_mm, "product", noted("int8", integers))
    unet = lib_onediff.compile_unet(half_unet(), low_bit="auto", verify=False)
    every = {product for _, product in products(runtime.layout_of(unet), 4, 4, 1)}
    for one in every:
        fast = {NORMED: (1, 2), GATED: (3, 1), PLAIN: (5, 5)}[one.source]
        measured(one, FP8, 4, fast[0])
        measured(one, INT8_KIND, 4, fast[1])
    served(unet, half_call(unet))
    assert now()[0] == LOW_BIT, reason()
    assert done["fp8"] == {(one.out, one.width) for one in every if one.source == NORMED}
    assert done["int8"] == {(one.out, one.width) for one in every if one.source == GATED}
    kept = runtime.managed_unet(unet).low_bit._kept
    assert {kind for name, kind in kept if name.endswith("ff.net.2")} == {INT8_KIND}, "no second copy"
    choice, gated = runtime.operators.low_bit.choice, next(one for one in every if one.source == GATED)
    measured(gated, INT8_KIND, 4, 2.8)
    assert choice.best(gated, torch.float16, [FP8.dtype, INT8_KIND.dtype]) == FP8, "a little faster is not enough"


def test_what_cannot_be_timed_is_tried_once_and_stops_no_call(
    on_a_gpu: Weather, monkeypatch: pytest.MonkeyPatch
) -> None:
    unet = lib_onediff.compile_unet(half_unet(), low_bit="fp8", verify=False)
    call = half_call(unet)
    served(unet, call)
    known, tried = runtime.operators.low_bit, list[Product]()

    def measure(product: Product, *others: Any) -> None:
        tried.append(product)
        raise RuntimeError("no graph can be captured here")

    monkeypatch.setattr(known, "measure", measure)
    known.forget()
    layout = runtime.layout_of(unet)
    assert LowBit.tune(known, FLOAT8, layout, call, runtime.operators.of("eager"), lambda work: 1.0) and tried
    count = len(tried)
    assert not LowBit.tune(known, FLOAT8, layout, call, runtime.operators.of("eager"), lambda work: 1.0)
    assert len(tried) == count == len(set(tried))
    served(unet, call)
    assert now()[0] == FLOAT8, reason()
    known.forget()


def test_what_was_measured_is_known_to_the_next_process() -> None:
    product, tuning_cache, kinds = Product(8, 16, 32, GATED), TuningCache(), [torch.float8_e4m3fn]

    def best(one: Product) -> Any:
        return ProductChoice(tuning_cache).best(one, torch.float16, kinds)

    assert best(product) is None, "small"
    assert best(Product(2048, 1280, 10240, NORMED)) is FP8
    assert best(Product(2048, 5120, 1280, GATED)) is None, "after a GEGLU"
    ProductChoice(tuning_cache).measure(
        product, torch.float16, FP8, lambda: 2, lambda: 1, lambda work: float(work())
    )
    assert best(product) is FP8
    tuning_cache.set(choice_name(product, torch.float16, FP8), "nonsense")
    assert best(product) is None


@pytest.mark.parametrize(("capability", "has"), [((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)])
def test_which_gpus_have_it(capability: tuple[int, int], has: bool) -> None:
    sentence = scaled_mm.too_old(capability, "RTX 3090")
    assert (sentence is None) == has
    assert has or "8.6" in sentence and "8.9" in sentence and "RTX 3090" in sentence
    assert int8_support.too_old(capability, "RTX 3090", "3.6.0") is None


def test_int8_on_turing_depends_on_the_release_of_triton() -> None:
    assert int8_support.too_old((7, 5), "RTX 2080", "3.2.0") is None
    newer = int8_support.too_old((7, 5), "RTX 2080", "3.6.0")
    assert "3.6.0" in newer and "8.0" in newer and "7.5 with 3.2" in newer and "RTX 2080" in newer
    assert "3.2" not in int8_support.too_old((7, 0), "V100", "3.6.0")


def test_the_probe_believes_no_wrong_product(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scaled_mm.support(CPU, torch.float16).result in (torch.float16, torch.bfloat16)
    monkeypatch.setattr(scaled_mm, "product", lambda tokens, weight, bias, result: torch.zeros(64, 128, device=CPU))
    found = scaled_mm.support(CPU, torch.float16)
    assert found.result is None and "wrong by" in found.reason

    def missing(*given: Any) -> Tensor:
        raise RuntimeError("not compiled in\nat line 3")

    monkeypatch.setattr(scaled_mm, "product", missing)
    found = scaled_mm.support(CPU, torch.float16)
    assert found.result is None and "not compiled in" in found.reason and "\n" not in found.reason


def test_where_only_bfloat16_comes_out_the_output_is_still_the_models(
    on_a_gpu: Weather, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_low_bit(monkeypatch, torch.bfloat16)
    unet = lib_onediff.compile_unet(half_unet(), low_bit="fp8")
    call = half_call(unet)
    assert relative_error(served(unet, call), diffusers_output(unet, call)) < 0.12
    assert now()[0] == FLOAT8, reason()

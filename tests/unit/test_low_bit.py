"""Low-bit (products in 8 bits) in whole UNets, and changes of weights, memory or settings after it. Here all errors are
within the budget; test_low_bit_budget.py has the others."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from builders import diffusers_output, generating, relative_error, served
from ladder_builders import StandInOperators, reason
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from low_bit_builders import EIGHT, EXACT, compiled, entry_of, half_call, half_unet, kinds_kept, served_by

import lib_onediff
from lib_onediff.core.card import TuningCache
from lib_onediff.core.layer_weights import QuantizedWeight
from lib_onediff.core.leaves import GATED, NORMED
from lib_onediff.core.settings import MOST_LOW_BIT_ERROR, Settings
from lib_onediff.core.table import State
from lib_onediff.devices.cuda.kernels import products
from lib_onediff.devices.cuda.kernels.launch_config import Launches
from lib_onediff.devices.cuda.low_bit import float8
from lib_onediff.devices.cuda.low_bit.choice import LowBit, times_name
from lib_onediff.runtime.runtime import runtime
from lib_onediff.ui.status import backend_sentence
from lib_onediff.weights import low_bit
from lib_onediff.weights.low_bit import FP8, INT8, KINDS, Kind, Product

CPU = torch.device("cpu")


@pytest.mark.parametrize(("option", "worst"), [("fp8", 0.12), ("int8", 0.04), ("auto", 0.12)])
def test_a_unet_in_eight_bits_is_close_to_the_host_but_not_equal(
    on_a_gpu: StandInOperators, option: str, worst: float
) -> None:
    """The cache entry has the same error, which the Cache page shows, and the third call is replayed. worst: the
    largest relative error to the host; fp8 keeps three bits of each factor, int8 seven bits of the largest one in a
    row."""
    unet = compiled(half_unet(), option)
    call = half_call(unet)
    host = diffusers_output(unet, call)
    error = relative_error(served(unet, call), host)
    assert served_by()[0] == EIGHT, reason()
    assert 1e-3 < error < worst
    assert entry_of(option).relative_error == pytest.approx(error, rel=0.05), "what the panel shows"
    served(unet, call)
    served(unet, call)
    assert served_by() == (EIGHT, "graph")
    layers = len(runtime.services.networks.get(unet).low_bit.names())
    assert layers >= 6 and backend_sentence(lib_onediff.status()) == f"native, 8-bit ({layers} layers)"


def test_each_value_of_low_bit_has_its_own_cache_entry_and_off_is_exact(on_a_gpu: StandInOperators) -> None:
    """One UNet makes images with fp8, int8 and off. With off, the 8-bit weights are freed, and the output equals, to
    the bit, that of a UNet that never had them. Afterwards fp8 is captured anew, because its weights have other
    addresses."""
    unet = compiled(half_unet(), "fp8")
    call = half_call(unet)
    for _ in range(3):
        served(unet, call)
    held = runtime.totals().low_bit
    assert served_by() == (EIGHT, "graph") and kinds_kept(unet) == {FP8}
    with generating(runtime, Settings(low_bit="int8", low_bit_budget=MOST_LOW_BIT_ERROR)):
        served(unet, call)
        assert served_by()[0] == EIGHT and kinds_kept(unet) == {INT8}
        assert held < runtime.totals().low_bit < 1.5 * held, "not those of both; int8 has a scale for every row"
    with generating(runtime, Settings()):
        exact = served(unet, call)
        assert served_by()[0] == EXACT and runtime.totals().low_bit == 0
    assert {str(row.lossy) for row in runtime.rows()[0].shapes} == {"", "8-bit"}
    assert entry_of("fp8").state is State.PROVED and entry_of("int8").state is State.PROVED
    served(unet, call)
    assert served_by() == (EIGHT, "plain"), "its graph knew where the weights lay"
    fresh = lib_onediff.compile_unet(half_unet())
    assert torch.equal(served(fresh, call), exact), "nothing of it is left"


def addresses_of(kept: Mapping[str, Sequence[QuantizedWeight]]) -> dict[str, list[int]]:
    """The address of each layer's 8-bit values."""
    return {name: [weight.values.data_ptr() for weight in weights] for name, weights in kept.items()}


@pytest.mark.parametrize("option", ["fp8", "int8"])
def test_an_edited_weight_is_quantized_again_at_the_same_address(on_a_gpu: StandInOperators, option: str) -> None:
    """Weights are edited in place, as by merging a LoRA. CUDA graphs read the 8-bit weights at fixed addresses. With
    their scales, these are within 5 % of the edited weights."""
    unet = compiled(half_unet(), option)
    call = half_call(unet)
    before = served(unet, call)
    kept = runtime.services.networks.get(unet).low_bit
    addresses = addresses_of(kept.kept(KINDS))
    with torch.no_grad():
        for name, parameter in unet.named_parameters():
            if "ff.net" in name:
                parameter.mul_(1.5)
    assert relative_error(served(unet, call), before) > 0.1
    for name, weight in runtime.services.networks.get(unet).source(entry_of(option).key.lossy, call).weights().items():
        for rounded in weight.low_bit:
            back = rounded.values.float() * rounded.scales.t()
            assert relative_error(back.half(), weight.weight) < 0.05, name
    assert addresses_of(kept.kept(KINDS)) == addresses, "graphs know those"


def test_without_memory_for_8_bit_weights_native_computes_exactly_and_gives_the_reason(
    on_a_gpu: StandInOperators, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the failed allocation, no other is tried until the next sampling begins."""
    unet = compiled(half_unet(), "fp8")
    tries = []

    def full(*given: Any) -> Any:
        tries.append(1)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(low_bit, "empty_like", full)
        for _ in range(2):
            served(unet, half_call(unet))
            assert served_by()[0] == EXACT
            assert "Low-bit is inactive: there is not enough GPU memory for the 8-bit weights" in reason()
    assert len(tries) == 1, "not at every step"
    runtime.begin_sampling(unet)
    served(unet, half_call(unet))
    assert served_by()[0] == EIGHT, reason()


@pytest.mark.parametrize(("module", "name", "option"), [
    (float8, "product", "fp8"), (products, "int8_product", "int8"),
], ids=["fp8", "int8"])
def test_8_bit_outputs_that_differ_too_much_from_the_host_output_are_not_used(
    on_a_gpu: StandInOperators, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, option: str
) -> None:
    """The kernel of 8-bit products (module, name) is patched to return three times its result. The first call compares,
    and returns the host's output; the second is exact."""
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: 3 * real(*given))
    unet = compiled(half_unet(), option)
    call = half_call(unet)
    output = served(unet, call)
    assert torch.equal(output, diffusers_output(unet, call)), "the first output is the host's"
    assert entry_of(option).state is State.FAILED and "output differs" in entry_of(option).reason
    served(unet, call)
    assert served_by()[0] == EXACT and "output differs" in reason()


# --- networks and devices without 8-bit products ----------------------------------------------------------------------


def test_the_probe_of_float8_finds_wrong_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe, float8_support(), multiplies two matrices before the first use of float8. A kernel that returns zeros,
    and a missing one, must give a reason, not an exception."""
    assert float8.float8_support(CPU, torch.float16).result in (torch.float16, torch.bfloat16)
    monkeypatch.setattr(float8, "product", lambda tokens, weight, bias, result: torch.zeros(64, 128, device=CPU))
    found = float8.float8_support(CPU, torch.float16)
    assert found.result is None and "have a relative error of" in found.reason

    def missing(*given: Any) -> Tensor:
        raise RuntimeError("not compiled in\nat line 3")

    monkeypatch.setattr(float8, "product", missing)
    found = float8.float8_support(CPU, torch.float16)
    assert found.result is None and "not compiled in" in found.reason and "\n" not in found.reason


def a_choice(tuning_cache: TuningCache) -> LowBit:
    return LowBit(tuning_cache, Launches(tuning_cache))


def test_every_layer_quantized_chooses_eight_bits_without_measurements() -> None:
    """every_layer_quantized() serves to measure a checkpoint's errors, for which times do not matter. Of both formats,
    it chooses FP8, the less precise one."""
    choice = a_choice(TuningCache())
    small = Product(8, 16, 32, GATED)
    with choice.every_layer_quantized():
        assert choice.best(small, torch.float16, KINDS) is FP8, "the lossier of both"
        assert choice.best(small, torch.float16, [INT8]) is INT8
    assert choice.best(small, torch.float16, KINDS) is None, "nothing was measured"


@pytest.mark.parametrize(("fp8", "int8", "kind"), [
    ((2.0, 1.9), None, None), ((2.0, 1.7), None, FP8), (None, (2.0, 1.0), INT8), ((2.0, 1.0), (2.0, 0.95), FP8),
    ((2.0, 1.0), (2.0, 0.85), INT8), ((2.0, 1.9), (2.0, 1.75), INT8),
])
def test_products_that_are_a_tenth_faster_in_8_bits_use_them_also_in_the_next_process(
    fp8: tuple[float, float] | None, int8: tuple[float, float] | None, kind: Kind | None
) -> None:
    """INT8 must also be a tenth faster than FP8, because a GPU at its power limit lowers its clock under INT8. fp8,
    int8: (milliseconds in 16 bits, in 8 bits). kind: the chosen format; None: 16 bits. A LowBit on the same tuning
    cache stands for the next process."""
    tuning_cache = TuningCache()
    product = Product(2048, 1280, 10240, NORMED)
    for one, times in ((FP8, fp8), (INT8, int8)):
        if times is not None:
            a_choice(tuning_cache).note(product, torch.float16, one, *times)
    assert a_choice(tuning_cache).best(product, torch.float16, KINDS) is kind
    tuning_cache.set(times_name(product, torch.float16, FP8), "nonsense")
    assert a_choice(tuning_cache).best(product, torch.float16, [FP8]) is None

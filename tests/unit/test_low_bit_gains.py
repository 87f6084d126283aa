"""Low-bit: which products are done in eight bits, as was measured."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import served
from ladder_builders import Weather, reason

pytest.importorskip("triton", reason="needs Triton")

from low_bit_builders import EIGHT, compiled, half_call, half_unet, measured, now

from lib_onediff.model.low_bit import FP8, GATED, INT8, KINDS, NORMED, PLAIN
from lib_onediff.ops.quantized import int8_mm, scaled_mm
from lib_onediff.ops.quantized.gains import Product, ProductChoice, choice_name, products
from lib_onediff.ops.tuning_cache import TuningCache
from lib_onediff.runtime.runtime import runtime


def test_auto_takes_for_each_product_what_was_measured_to_be_faster(
    on_a_gpu: Weather, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: dict[str, set[tuple[int, ...]]] = {"fp8": set(), "int8": set()}
    eight, integers = scaled_mm.product, int8_mm.product

    def noted(name: str, real: Any) -> Any:
        return lambda *given: (done[name].add(tuple(given[1].values.shape)), real(*given))[1]

    monkeypatch.setattr(scaled_mm, "product", noted("fp8", eight))
    monkeypatch.setattr(int8_mm, "product", noted("int8", integers))
    unet = compiled(half_unet(), "auto", verify=False)
    every = {product for _, product in products(runtime.layout_of(unet), 4, 4, 1)}
    for one in every:
        fast = {NORMED: (1, 2), GATED: (3, 1), PLAIN: (5, 5)}[one.source]
        measured(one, FP8, 4, fast[0])
        measured(one, INT8, 4, fast[1])
    served(unet, half_call(unet))
    assert now()[0] == EIGHT, reason()
    assert done["fp8"] == {(one.out, one.width) for one in every if one.source == NORMED}
    assert done["int8"] == {(one.out, one.width) for one in every if one.source == GATED}
    kept = runtime.managed_unet(unet).low_bit._kept
    assert {kind for name, kind in kept if name.endswith("ff.net.2")} == {INT8}, "no second copy"
    choice, gated = runtime.devices.lossy.low_bit.choice, next(one for one in every if one.source == GATED)
    measured(gated, INT8, 4, 2.8)
    assert choice.best(gated, torch.float16, [FP8.dtype, INT8.dtype]) == FP8, "a little faster is not enough"


def test_auto_prefers_fp8_where_nothing_was_measured_and_everywhere() -> None:
    choice, kinds = ProductChoice(TuningCache()), [kind.dtype for kind in KINDS]
    large, small = Product(2048, 1280, 10240, NORMED), Product(8, 16, 32, GATED)
    assert choice.best(large, torch.float16, kinds) is FP8 and choice.best(small, torch.float16, kinds) is None
    assert choice.best(large, torch.float16, [INT8.dtype]) is INT8
    with choice.used_everywhere():
        assert choice.best(small, torch.float16, kinds) is FP8, "the bench shows the lossier of both"
        assert choice.best(small, torch.float16, [INT8.dtype]) is INT8


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

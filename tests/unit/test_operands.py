"""An operand is made in one list of steps, and a storage format is one step more."""
from __future__ import annotations

import torch
from torch import Tensor

from lib_onediff.core.layer_weights import LayerWeights, LowRank, QuantizedWeight
from lib_onediff.weights.on_the_fly import AppliedFunctions
from lib_onediff.weights.operands import Cast, Operands, Step, WithLowBit, steps_of

HALF = torch.float16


class Decoded(Step):
    """A storage format of a test: integers, in sixteenths."""

    def operand(self, name: str, before: LayerWeights) -> LayerWeights:
        return before if before.weight.dtype != torch.int8 else before._replace(weight=before.weight.float() / 16)


class Kept(Step):
    """A storage format that a kernel computes with: nothing is decoded."""

    def operand(self, name: str, before: LayerWeights) -> LayerWeights:
        weight = torch.empty_like(before.weight, dtype=HALF, device="meta")
        scales = torch.ones(1, 1)
        return LayerWeights(weight, before.bias, low_bit=(QuantizedWeight(before.weight, scales),))


def stored(weight: Tensor) -> dict[str, LayerWeights]:
    return {"layer": LayerWeights(weight, torch.ones(2))}


def applied_to(**found: dict[str, Tensor]) -> AppliedFunctions:
    applied = AppliedFunctions(HALF, torch.device("cpu"))
    applied.weights = found.get("weights", {})
    applied.biases = found.get("biases", {})
    down = torch.ones(1, 3, dtype=HALF)
    applied.low_rank = {"layer": LowRank(down, ((0, down.t()),))}
    return applied


def test_a_storage_format_is_one_step_before_the_others() -> None:
    """Whether it is decoded, or kept as it is stored: casts and LoRAs follow."""
    integers = torch.full((2, 3), 8, dtype=torch.int8)
    later = steps_of(stored(integers), HALF, None, (), applied_to())
    decoded = Operands(stored(integers), [Decoded(), *later])["layer"]
    assert decoded.weight.dtype == HALF and decoded.weight.eq(0.5).all() and decoded.low_rank is not None
    kept = Operands(stored(integers), [Kept(), *later])["layer"]
    assert kept.low_bit[0].values is integers and kept.low_rank is not None


def test_what_the_hosts_functions_made_is_not_cast_anew() -> None:
    changed = torch.full((2, 3), 7, dtype=HALF)
    bias = torch.zeros(2, dtype=HALF)
    operands = Operands(stored(torch.ones(2, 3)), steps_of(
        stored(torch.ones(2, 3)), HALF, None, (), applied_to(weights={"layer": changed}, biases={"layer": bias})
    ))
    assert operands["layer"].weight is changed and operands["layer"].bias is bias and operands.bias("layer") is bias


def test_a_copy_in_eight_bits_stands_for_weight_and_loras() -> None:
    low_bit = (QuantizedWeight(torch.ones(2, 3, dtype=torch.int8), torch.ones(1, 1)),)
    for alone in (frozenset[str](), frozenset({"layer"})):
        last = WithLowBit({"layer": low_bit}, {}, HALF, alone)
        before = stored(torch.ones(2, 3))
        operand = Operands(before, steps_of(before, HALF, None, (), applied_to(), last))["layer"]
        assert operand.low_bit is low_bit and operand.low_rank is None
        assert operand.weight.is_meta == bool(alone) and operand.weight.dtype == HALF


def test_a_weight_that_is_read_twice_in_a_row_is_cast_once_and_none_for_its_bias_alone() -> None:
    before = {**stored(torch.ones(2, 3)), "norm": LayerWeights(torch.ones(3), torch.ones(3))}
    operands = Operands(before, [Cast(HALF)])
    first = operands["layer"].weight
    assert operands["norm"] is before["norm"] and operands["layer"].weight is first
    assert operands.bias("layer") is before["layer"].bias
    every = Operands(before, [Cast(HALF, vectors=True)])
    assert {part.dtype for name in every for part in every[name][:2] if part is not None} == {HALF}

"""LoRAs computed beside their layers (x @ down @ up is added to the output), by torch's operators and our kernels,
compared with merged weights in float64. And which of the Forge family's patches are read as LoRAs."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import relative_error
from grid import grid
from torch import Tensor

from lib_onediff.core.layer_weights import LayerWeights, LowRank
from lib_onediff.core.leaves import Convolution
from lib_onediff.core.operators import Operators, Residual
from lib_onediff.core.refusal import Refusal
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.hosts.forge.weight_functions import low_rank_update
from lib_onediff.weights.on_the_fly import AppliedFunctions
from lib_onediff.weights.operands import Operands, steps_of
from lib_onediff.weights.scan import LowRankUpdate, WeightFunctions

pytestmark = pytest.mark.usefixtures("exact_products")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CLOSE = 1e-5
MEMBERS = (48, 16, 32)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


@pytest.fixture(params=["torch", "native"])
def ops(request: pytest.FixtureRequest) -> Operators:
    if request.param == "torch":
        return torch_ops
    pytest.importorskip("triton", reason="needs Triton")
    from lib_onediff.devices.cuda.kernels.operators import NativeOperators

    return NativeOperators()


def with_loras(out: int, into: tuple[int, ...], biased: bool = True, members: tuple[int, ...] = ()) -> LayerWeights:
    """A layer with random weights and LoRAs. members: the numbers of outputs of the layers that are fused into it; all
    of them except the second have a LoRA, each of another rank. (): not fused."""
    ranks = {row: 2 + row % 5 for index, row in enumerate(first_rows(members or (out,))) if index != 1}
    sizes = dict(zip(first_rows(members or (out,)), members or (out,), strict=True))
    ups = tuple((row, random(sizes[row], rank)) for row, rank in ranks.items())
    low_rank = LowRank(random(sum(ranks.values()), *into), ups)
    return LayerWeights(random(out, *into), random(out) if biased else None, low_rank=low_rank)


def first_rows(members: tuple[int, ...]) -> list[int]:
    return [sum(members[:index]) for index in range(len(members))]


def merged(layer: LayerWeights) -> LayerWeights:
    """The layer with its LoRAs merged into the weight, in float64."""
    assert layer.low_rank is not None
    weight = layer.weight.double()
    rank = 0
    for row, up in layer.low_rank.ups:
        down = layer.low_rank.down[rank:rank + up.shape[1]].double()
        weight[row:row + len(up)] += (up.double() @ down.flatten(1)).view(len(up), *weight.shape[1:])
        rank += up.shape[1]
    return LayerWeights(weight, None if layer.bias is None else layer.bias.double())


@grid(members=[(), MEMBERS], biased=[True, False])
def test_a_linear_layer_with_loras_is_close_to_one_with_merged_weights(
    ops: Operators, members: tuple[int, ...], biased: bool
) -> None:
    """members: see with_loras(). ops: torch's operators, or those of our kernels. The second comparison is of the
    operator that adds the layer's output to a residual."""
    layer = with_loras(sum(MEMBERS), (64,), biased, members)
    x = random(2, 33, 64)
    tokens = random(2, 33, sum(MEMBERS))
    expected = torch_ops.linear(x.double(), merged(layer))
    assert relative_error(ops.linear(x, layer), expected.float()) < CLOSE
    expected = tokens.double() + expected
    assert relative_error(ops.materialize(ops.add_linear(Residual(tokens), x, layer)), expected.float()) < CLOSE


@grid(biased=[True, False], joined=[True, False], form=[torch.contiguous_format, torch.channels_last])
def test_a_pointwise_convolution_with_loras_is_close_to_one_with_merged_weights(
    ops: Operators, biased: bool, joined: bool, form: torch.memory_format
) -> None:
    """joined: the input is a pair of images, which count as concatenated along the channels."""
    layer = with_loras(48, (64, 1, 1), biased)
    image = random(2, 64, 8, 8).to(memory_format=form)
    given = ops.concatenate(image[:, :32], image[:, 32:]) if joined else image
    expected = torch_ops.pointwise(image.double(), merged(layer))
    assert relative_error(ops.pointwise(given, layer), expected.float()) < CLOSE


@grid(biased=[True, False], circular=[True, False], stride=[1, 2])
def test_a_convolution_with_loras_is_close_to_one_with_merged_weights(
    ops: Operators, biased: bool, circular: bool, stride: int
) -> None:
    """A 3x3 convolution. circular: the padding of tiling images."""
    layer = with_loras(48, (32, 3, 3), biased)
    image = random(2, 32, 8, 8)
    shape = Convolution("", 32, 48, 3, stride, 1, circular)
    expected = torch_ops.convolution(image.double(), merged(layer), shape)
    assert relative_error(ops.convolution(image, layer, shape), expected.float()) < CLOSE


@pytest.mark.parametrize("size", [1e4, 1.0, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_loras_with_very_large_or_small_down_matrices_neither_overflow_nor_underflow(
    dtype: torch.dtype, size: float
) -> None:
    """In float16, an input times a large down matrix would overflow, and times a small one underflow. So
    AppliedFunctions scales both matrices of a LoRA. size: the scale of the down matrix; the up matrix has 1 / size. The
    reference is the merged weight in float64."""
    layer = LayerWeights(random(48, 64).to(dtype), None)
    x = random(2, 33, 64).to(dtype)
    up = random(48, 4) / size
    down = random(4, 64) * size
    down[1] = 0
    applied = AppliedFunctions(dtype, up.device)
    applied.fit({"a": WeightFunctions((LowRankUpdate(up, down, 0.5),))}, {"a": layer}, {"a": ["a"]}, None)
    stored = {"a": layer}
    # As much of a binding as steps_of reads.
    binding: Any = SimpleNamespace(dtype=dtype, layers=SimpleNamespace(formats={}))
    output = torch_ops.linear(x, Operands(stored, steps_of(binding, stored, None, (), applied))["a"])
    exact = x.double() @ (layer.weight.double() + 0.5 * up.double() @ down.double()).t()
    assert relative_error(output.float(), exact.float()) < (CLOSE if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("ranks", [(4, 4, 4), (4, 20, 4), (4, 0, 4), (0, 32, 0)], ids=str)
def test_loras_of_layers_with_one_input_add_up_in_each_layer_and_in_the_fused_layer(ranks: tuple[int, ...]) -> None:
    """Layers a, b and c have one input, and "all" is the layer that is fused from them. ranks: the ranks of their
    LoRAs, each the sum of several LoRAs of rank 2. The reference is the sum of the weight and all up @ down. A second
    fit of the same LoRAs keeps all addresses. With equal ranks, the up matrices are adjacent in memory, as a kernel
    reads them."""
    names = ("a", "b", "c")
    weights = {name: LayerWeights(random(32, 64), None) for name in names}
    weights["all"] = LayerWeights(torch.cat([weights[name].weight for name in names]), None)
    functions: dict[str, WeightFunctions] = {}
    added = dict.fromkeys(names, torch.zeros(32, 64, device=DEVICE))
    for name, rank in zip(names, ranks, strict=True):
        if rank:
            updates = tuple(LowRankUpdate(random(32, 2), random(2, 64), 0.5) for _ in range(rank // 2))
            functions[name] = WeightFunctions(updates)
            added[name] = torch.stack([0.5 * one.up @ one.down for one in updates]).sum(0)
    added["all"] = torch.cat([added[name] for name in names])
    applied = AppliedFunctions(torch.float32, DEVICE)
    assert applied.fit(functions, weights, {"all": names}, None)
    again = AppliedFunctions(torch.float32, DEVICE, before=applied)
    assert not again.fit(functions, weights, {"all": names}, None), "they lie where they did"
    for name, low_rank in again.low_rank.items():
        found = merged(weights[name]._replace(low_rank=low_rank)).weight
        assert relative_error(found.float(), weights[name].weight + added[name]) < CLOSE
    joint = again.low_rank["all"]
    addresses = [up.data_ptr() for _, up in joint.ups]
    steps = {second - first for first, second in zip(addresses, addresses[1:], strict=False)}
    if len(set(ranks)) == 1:
        assert steps == {joint.ups[0][1].nbytes}, "a kernel reads all ups as they lie"


def test_the_reason_for_too_little_memory_names_the_two_amounts_that_were_compared() -> None:
    """Copies of weights that functions change need 3 MiB. Free are 1 MiB, and 1 MiB of older copies that are written
    over."""
    sizes = {"one": 256, "two": 512}
    weights = {name: LayerWeights(torch.zeros(size, 1024, device=DEVICE), None) for name, size in sizes.items()}
    changed = WeightFunctions(weight=lambda weight: weight + 1)
    before = AppliedFunctions(torch.float32, DEVICE)
    before.fit({"one": changed}, weights, {"one": ["one"]}, lambda: 1 << 20)
    again = AppliedFunctions(torch.float32, DEVICE, before=before)
    with pytest.raises(Refusal, match="need 3 MiB, but only 2 MiB are free"):
        again.fit(dict.fromkeys(weights, changed), weights, {name: [name] for name in weights}, lambda: 1 << 20)


WEIGHT = torch.zeros(8, 6, 3, 3)
UP = torch.ones(8, 2, 1, 1)
DOWN = torch.ones(2, 6, 3, 3)


@pytest.mark.parametrize(("parts", "scale"), [((UP, DOWN, 4.0, None, None), 1.0), ((UP, DOWN, None), 0.5)])
def test_a_plain_lora_of_the_forge_family_becomes_a_low_rank_update(parts: tuple[Any, ...], scale: float) -> None:
    """A patch is [strength, (kind, parts), strength of the model, offset, function]; newer hosts add a flag. parts: up,
    down, alpha and, if the host has them, more. scale: alpha / rank times the strength."""
    update = low_rank_update([0.5, ("lora", parts), 1.0, None, None, True], WEIGHT)
    assert update is not None and update.scale == scale
    assert update.up.shape == (8, 2) and update.down.shape == DOWN.shape


@pytest.mark.parametrize("patch", [
    [0.5, ("lora", (UP, DOWN, 4.0, torch.ones(2, 2, 3, 3), None)), 1.0, None, None],
    [0.5, ("lora", (UP, DOWN, 4.0, None, torch.ones(8, 1, 1, 1))), 1.0, None, None],
    [0.5, ("lora", (UP[:4], DOWN, 4.0, None, None)), 1.0, None, None],
    [0.5, ("loha", (UP, DOWN, 4.0, UP, DOWN, None, None)), 1.0, None, None], [0.5, (WEIGHT,), 1.0, None, None],
    [0.5, ("lora", (UP, DOWN, 4.0)), 0.9, None, None], [0.5, ("lora", (UP, DOWN, 4.0)), 1.0, (0, 0, 4), None],
    [0.5, ("lora", (UP, DOWN, 4.0)), 1.0, None, torch.neg],
], ids=["with a middle", "DoRA", "of a part", "LoHa", "difference", "strength of the model", "offset", "function"])
def test_patches_that_are_not_plain_loras_stay_functions_of_the_host(patch: list[Any]) -> None:
    """low_rank_update() returns None for a patch with a part that a plain LoRA lacks; OneDiff then applies the host's
    own function to the weight."""
    assert low_rank_update(patch, WEIGHT) is None

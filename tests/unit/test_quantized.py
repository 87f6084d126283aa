"""Products with weights that are stored in 8 bits, by torch's operators, against the hosts' rule in numpy.

The hosts' rule for an INT8 weight: each row of the input is divided by its scale (its largest absolute value / 127) and
rounded to integers; the product of integers is multiplied by the scales of the row and of the weight.
rotation: the group size of ConvRot, which rotates the weight and the rows of the input first; 0: none.
one_scale: whether the weight has one scale instead of one for each row.
"""
from __future__ import annotations

import numpy
import pytest
import torch
from exact_operators import relative_error
from grid import grid
from torch import Tensor

from lib_onediff.core.layer_weights import LayerWeights, LowRank, QuantizedWeight
from lib_onediff.core.operators import GEGLU, Activation, Residual
from lib_onediff.core.refusal import Refusal
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.devices.torch import quantized

WIDTH = 512
OUT = 96
ROWS = 7


def stored(
    width: int = WIDTH, out: int = OUT, rotation: int = 0, one_scale: bool = False, bias: bool = True,
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> LayerWeights:
    """A layer with random numbers whose weight exists in INT8 only."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-128, 128, (out, width), generator=generator, dtype=torch.int8)
    scales = torch.rand((1, 1 if one_scale else out), generator=generator) / 1000 + 1e-4
    vector = torch.randn(out, generator=generator).to(dtype) if bias else None
    weight = torch.empty((out, width), dtype=dtype, device="meta")
    return LayerWeights(weight, vector, (QuantizedWeight(values, scales, rotation),))


def dense(weight: QuantizedWeight) -> Tensor:
    """The decoded weight (out, in) with its rotation undone, in float64."""
    matrix = weight.values.double() * weight.scales.double().t()
    return matrix @ block_diagonal(matrix.shape[1], weight.rotation) if weight.rotation else matrix


def block_diagonal(width: int, group: int) -> Tensor:
    """ConvRot's rotation of a row of this width, in float64: a matrix of signs / sqrt(group) in each block. The sign
    changes for each base-4 digit at which the two indices add up to 3."""
    digits = (group.bit_length() - 1) // 2

    def sign(row: int, column: int) -> int:
        opposite = [(row >> 2 * digit & 3) + (column >> 2 * digit & 3) == 3 for digit in range(digits)]
        return -1 if sum(opposite) % 2 else 1

    signs = [[sign(row, column) for column in range(group)] for row in range(group)]
    block = torch.tensor(signs, dtype=torch.float64) / group**0.5
    return torch.block_diag(*[block] * (width // group))


def by_the_rule(x: Tensor, layer: LayerWeights) -> numpy.ndarray:
    """The product of a layer by the hosts' rule in float32, with exact sums of 64-bit integers."""
    [weight] = layer.low_bit
    rows = x.reshape(-1, x.shape[-1])
    if weight.rotation:
        rows = (rows.double() @ block_diagonal(rows.shape[1], weight.rotation)).float()
    number = rows.numpy()
    scales = numpy.maximum(numpy.abs(number).max(1, keepdims=True) / numpy.float32(127), numpy.float32(1e-30))
    integers = numpy.clip(numpy.rint(number / scales), -128, 127).astype(numpy.int64)
    sums = (integers @ weight.values.numpy().astype(numpy.int64).T).astype(numpy.float32)
    product = sums * (scales * weight.scales.numpy())
    return product if layer.bias is None else product + layer.bias.numpy()


@grid(rotation=[0, 4, 16, 64, 256], one_scale=[False, True], bias=[True, False], width=[512, 256])
def test_a_product_with_an_int8_weight_equals_the_product_by_the_hosts_rule(
    rotation: int, one_scale: bool, bias: bool, width: int
) -> None:
    """The reference is by_the_rule(), in numpy. With a rotation, the products are only close: sums in another order may
    round a number to the next integer. Both must be within 2 % of the product with the decoded weight in float64."""
    layer = stored(width, rotation=rotation, one_scale=one_scale, bias=bias)
    x = torch.randn(2, ROWS, width)
    x[0, 0] = 0
    found = torch_ops.linear(x, layer)
    expected = torch.from_numpy(by_the_rule(x, layer)).view(2, ROWS, OUT)
    if rotation:
        # Sums in another order may move a number across the middle between two integers.
        assert relative_error(found, expected.double()) < 1e-3
    else:
        assert torch.equal(found, expected)
    plain = x.double() @ dense(layer.low_bit[0]).t() + (0 if layer.bias is None else layer.bias.double())
    assert relative_error(found, plain) < 0.02


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rotation", [0, 256])
def test_in_half_precision_input_divided_by_scale_is_first_rounded_to_its_dtype(
    dtype: torch.dtype, rotation: int
) -> None:
    """The host divides tensors in the model's dtype, which rounds the quotient, before it rounds to integers. The
    product must be within 3 % of the one with the decoded weight in float64."""
    layer = stored(rotation=rotation, dtype=dtype)
    x = torch.randn(3, WIDTH).to(dtype)
    x[1] = 0
    values, scales = quantized.rounded_rows(x)
    quotient = (x.float() / scales.to(dtype).clamp_min(torch.finfo(dtype).tiny).float()).to(dtype)
    assert torch.equal(values, torch.from_numpy(numpy.rint(quotient.float().numpy())).clamp(-128, 127).to(torch.int8))
    found = torch_ops.linear(x, layer)
    assert found.dtype == dtype
    assert relative_error(found, x.double() @ dense(layer.low_bit[0]).t() + layer.bias.double()) < 0.03


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("width", [24, 1024, 3000])
def test_products_of_integers_are_exact(rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own int8 product, if it has one for the CPU, and by the fallback. The first row of each of the two
    matrices is all -128, so that their product is the largest possible sum."""
    left, right = (torch.randint(-128, 128, (count, width), dtype=torch.int8) for count in (rows, 17))
    left[0] = -128
    right[0] = -128
    expected = left.long() @ right.long().t()
    for has_int_mm in (quantized.has_int_mm(left.device), False):
        monkeypatch.setattr(quantized, "has_int_mm", lambda device, has=has_int_mm: has)
        assert torch.equal(quantized.integer_product(left, right).long(), expected)


def test_a_product_in_pieces_of_rows_equals_one_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large products are computed in pieces of PIECE numbers, to save memory; here in pieces of 4 rows, the last of
    1."""
    layer = stored(rotation=256)
    x = torch.randn(33, WIDTH)
    whole = torch_ops.linear(x, layer)
    monkeypatch.setattr(quantized, "PIECE", 4 * WIDTH)
    assert torch.equal(torch_ops.linear(x, layer), whole)


@pytest.mark.parametrize("one_scale", [True, False])
@pytest.mark.parametrize("values", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_float8_weight_is_decoded_and_its_input_is_not_quantized(values: torch.dtype, one_scale: bool) -> None:
    """The reference is the product with the decoded weight in float64. A quantized input would be further away than
    1e-5."""
    weight = torch.randn(OUT, WIDTH).to(values)
    scales = torch.rand(1, 1 if one_scale else OUT) + 0.5
    layer = LayerWeights(torch.empty(OUT, WIDTH, device="meta"), torch.randn(OUT), (QuantizedWeight(weight, scales),))
    x = torch.randn(2, 3, WIDTH)
    expected = x.double() @ (weight.double() * scales.double().t()).t() + layer.bias.double()
    assert relative_error(torch_ops.linear(x, layer), expected) < 1e-5


@pytest.mark.parametrize("lora_is_scaled", [False, True])
def test_the_input_is_not_quantized_if_the_layer_has_loras(lora_is_scaled: bool) -> None:
    """The host adds LoRAs to the decoded weight, and multiplies without quantizing. The reference is in float64.
    lora_is_scaled: whether the LoRA has a scale of 0.5."""
    down = torch.randn(4, WIDTH) / 20
    up = torch.randn(OUT, 4)
    scales = (torch.tensor(0.5),) if lora_is_scaled else ()
    layer = stored(rotation=256)
    x = torch.randn(5000, WIDTH)
    found = torch_ops.linear(x, layer._replace(low_rank=LowRank(down, ((0, up),), scales)))
    added = x.double() @ down.double().t() @ up.double().t() * (0.5 if lora_is_scaled else 1)
    assert relative_error(found, x.double() @ dense(layer.low_bit[0]).t() + layer.bias.double() + added) < 1e-5


def test_every_operator_supports_layers_with_8_bit_weights() -> None:
    """Gated additions, GEGLU, GELU and pointwise convolutions give the same as linear() with the other operation after
    it."""
    x = torch.randn(2, ROWS, WIDTH)
    tokens = torch.randn(2, ROWS, OUT)
    gate = torch.randn(2, OUT)
    layer = stored()
    reader = stored(OUT, 32)
    product = torch_ops.linear(x, layer)
    added = torch_ops.materialize(torch_ops.add_linear(Residual(tokens), x, layer, gate))
    assert torch.allclose(added, tokens + gate[:, None] * product)
    assert torch.equal(torch_ops.gated_linear(x, layer, GEGLU, reader), torch_ops.gated(product, GEGLU))
    activated = torch_ops.activated_linear(x, layer, Activation.GELU, reader)
    assert torch.equal(activated, torch.nn.functional.gelu(product))
    pixels = torch.randn(2, WIDTH, 3, 5)
    convolved = layer._replace(weight=layer.weight[:, :, None, None])
    expected = torch_ops.linear(torch_ops.image_to_tokens(pixels), layer)
    for image in (pixels, torch_ops.channels_last(pixels)):
        assert torch.allclose(torch_ops.image_to_tokens(torch_ops.pointwise(image, convolved)), expected)


@pytest.mark.parametrize(("group", "width", "values", "reason"), [
    (256, 320, torch.int8, "ConvRot groups of 256 do not divide a layer of 320 inputs"),
    (128, 512, torch.int8, "a ConvRot group of 128 is not a power of 4"),
    (256, 512, torch.float8_e4m3fn, "a layer has ConvRot and is stored in float8_e4m3fn, not INT8"),
])
def test_an_invalid_rotation_is_refused(group: int, width: int, values: torch.dtype, reason: str) -> None:
    """group: the group size of the rotation. width: the width of the weight. values: the dtype of its stored
    numbers."""
    weight = QuantizedWeight(torch.zeros(OUT, width).to(values), torch.ones(1, 1), group)
    layer = LayerWeights(torch.empty(OUT, width, device="meta"), None, (weight,))
    with pytest.raises(Refusal, match=reason):
        torch_ops.linear(torch.zeros(1, width), layer)

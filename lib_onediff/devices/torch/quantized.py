"""Products with weights that a file stores in eight bits, with the rounding of the hosts that load such files.

INT8: each row of the input is divided by (its largest absolute value / 127) and rounded to the nearest integer, half to
even. The integers are multiplied exactly, and the sums are scaled in float32. ConvRot: the weight is stored as W @ H^T
for each group of its inputs, with an orthonormal Hadamard matrix H, so the input is multiplied by H before it is
rounded. FP8: the weight is decoded, and multiplied in the input's dtype. INT8 with LoRAs is computed like FP8, because
the host adds the LoRAs to the decoded weight, and does not round the input.
"""
from __future__ import annotations

import functools

import torch
import torch.nn.functional as functional
from torch import Tensor

from ...core.layer_weights import LayerWeights, QuantizedWeight
from ...core.refusal import unsupported_model

# The integer to which the largest absolute value of a row is scaled, and the smallest scale of a row (one of zeros).
LARGEST = 127.0
SMALLEST = 1e-30
# quantized_linear computes as many rows at once as have this many numbers, in the input or in the output, whichever is
# wider: intermediate results take 12 bytes a number.
PIECE = 1 << 24
# float32 can represent every sum of this many products of int8 exactly.
EXACT_TERMS = 1024
# torch._int_mm on a GPU needs at least this many rows, and widths that are multiples of INT_MM_ALIGNED.
FEWEST_ROWS = 32
INT_MM_ALIGNED = 32
# The size of the square matrices with which has_int_mm tries it.
PROBE = 32


def quantized_linear(x: Tensor, layer: LayerWeights) -> Tensor:
    """x (..., in) times the layer's weight, plus the bias if there is one: (..., out) in the dtype of x. LoRAs are not
    added.

    layer.low_bit[0] must be INT8, (out, in); check with is_decoded() before. Raises Refusal for an invalid rotation.
    """
    weight = layer.low_bit[0]
    rows = x.reshape(-1, x.shape[-1])
    out = len(weight.values)
    product = torch.empty((len(rows), out), dtype=x.dtype, device=x.device)
    count = max(1, PIECE // max(out, rows.shape[1]))
    for first in range(0, len(rows), count):
        values, scales = rounded_rows(rotated(rows[first:first + count], weight))
        sums = integer_product(values, weight.values).float()
        product[first:first + count] = sums.mul_(scales * weight.scales)
    if layer.bias is not None:
        product += layer.bias.to(x.dtype)
    return product.view(*x.shape[:-1], out)


def is_decoded(layer: LayerWeights) -> bool:
    """Whether a layer's 8-bit weight has to be decoded before the product: True for FP8, and for INT8 with LoRAs. False
    for INT8 without LoRAs, which quantized_linear() multiplies as it is stored. layer: one with an 8-bit weight."""
    return layer.low_bit[0].values.dtype != torch.int8 or layer.low_rank is not None


def decoded(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The weight (out, in) as a new tensor in this dtype, with scales applied and rotation undone. A rotated weight is
    computed in float32 and rounded once, another one in this dtype. Raises Refusal for an invalid rotation."""
    check_rotation(weight)
    if not weight.rotation:
        return weight.values.to(dtype).mul_(weight.scales.t())
    groups: Tensor = weight.values.float().mul_(weight.scales.t()).unflatten(-1, (-1, weight.rotation))
    return (groups @ hadamard(weight.rotation, groups.device)).to(dtype).flatten(-2)


def rounded_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (rows, width) quantized to int8, and their scales, float32 (rows, 1). As in the hosts, the quotient is first
    rounded to the rows' dtype."""
    scales = (rows.abs().amax(dim=-1, keepdim=True).float() / LARGEST).clamp_min(SMALLEST)
    divisors = scales.to(rows.dtype)
    # In float16 the scale of a row of zeros is zero.
    divisors = torch.where(divisors == 0, torch.finfo(rows.dtype).tiny, divisors)
    return (rows / divisors).round_().clamp_(-LARGEST - 1, LARGEST).to(torch.int8), scales


def rotated(rows: Tensor, weight: QuantizedWeight) -> Tensor:
    """Rows (..., width), each group of weight.rotation numbers multiplied by the Hadamard matrix of the rotation, in
    the rows' dtype. The given rows if the weight is not rotated. Raises Refusal for an invalid rotation."""
    check_rotation(weight)
    if not weight.rotation:
        return rows
    matrix = hadamard(weight.rotation, rows.device)
    groups: Tensor = rows.unflatten(-1, (-1, weight.rotation))
    return (groups.float() @ matrix).to(rows.dtype).flatten(-2)


def hadamard(width: int, device: torch.device) -> Tensor:
    """The orthonormal, symmetric Hadamard matrix (width, width) of ConvRot in float32. width: a power of 4."""
    four = torch.ones((4, 4), dtype=torch.float32, device=device)
    four -= 2 * torch.eye(4, dtype=torch.float32, device=device).flip(0)
    matrix = torch.ones((1, 1), dtype=torch.float32, device=device)
    while len(matrix) < width:
        matrix = torch.kron(matrix, four)
    return matrix / float(width**0.5)


def check_rotation(weight: QuantizedWeight) -> None:
    """Raise Refusal, with the reason, if the weight's rotation is invalid for its dtype or width. No rotation (0) is
    valid."""
    group = weight.rotation
    width = weight.values.shape[1]
    if not group:
        return
    if weight.values.dtype != torch.int8:
        found = str(weight.values.dtype).removeprefix("torch.")
        raise unsupported_model(f"a layer has ConvRot and is stored in {found}, not INT8")
    if not is_power_of_four(group):
        raise unsupported_model(f"a ConvRot group of {group} is not a power of 4")
    if width % group:
        raise unsupported_model(f"ConvRot groups of {group} do not divide a layer of {width} inputs")


def is_power_of_four(number: int) -> bool:
    """Whether a number is 4, 16, 64 and so on. False for 1."""
    return number > 1 and number.bit_count() == 1 and number.bit_length() % 2 == 1


def integer_product(rows: Tensor, weight: Tensor) -> Tensor:
    """The exact product of int8 matrices, rows (rows, in) and weight (out, in): (rows, out) in int32. By torch._int_mm
    where it works for the device and the widths, otherwise by float_product()."""
    if not has_int_mm(rows.device):
        return float_product(rows, weight)
    if not rows.is_cuda:
        return torch._int_mm(rows, weight.t())
    count, width = rows.shape
    if width % INT_MM_ALIGNED or len(weight) % INT_MM_ALIGNED:
        return float_product(rows, weight)
    if count < FEWEST_ROWS:
        rows = functional.pad(rows, (0, 0, 0, FEWEST_ROWS - count))
    return torch._int_mm(rows, weight.t())[:count]


def float_product(rows: Tensor, weight: Tensor) -> Tensor:
    """The same as integer_product(), on any device, by float32 products of EXACT_TERMS terms each, which are exact,
    with TF32 too. The products are summed in int32."""
    total = torch.zeros((len(rows), len(weight)), dtype=torch.int32, device=rows.device)
    for first in range(0, rows.shape[1], EXACT_TERMS):
        left, right = (part[:, first:first + EXACT_TERMS].float() for part in (rows, weight))
        total += (left @ right.t()).to(torch.int32)
    return total


@functools.cache
def has_int_mm(device: torch.device) -> bool:
    """Whether torch._int_mm works on a device, found by a small product, once for each device. torch 2.1 has it for
    NVIDIA GPUs only."""
    probe = torch.ones((PROBE, PROBE), dtype=torch.int8, device=device)
    try:
        sums = torch._int_mm(probe, probe.t())
    except (RuntimeError, AttributeError):
        return False
    return bool((sums == PROBE).all())

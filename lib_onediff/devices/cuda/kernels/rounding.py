"""Kernels that write rows of tokens in eight bits: norms, gated units, and the quantization of existing rows and of
weights.

Norms with modulation and RMS norms can write 16 bits too, because the same kernel adds the residual's update. In
float8, the rows of a norm share one scale; all other rows have one scale each. int8 rows are rounded by a Rule.
"""
from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from ....core.layer_weights import LayerWeights, QuantizedWeight
from ....core.leaves import AdaptiveNorm, RMSNorm
from ....core.operators import Activation, Modulation, QuantizedTokens, Residual
from ....weights.low_bit import INT8, Kind, empty_like, kind_of, largest_of
from .launch_config import LAYER_NORM, LaunchConfig
from .launching import ceil_div, launch, power_of_two
from .tokens import ACTIVATIONS, rows_in_memory

# How many columns of a row one warp processes, and the smallest and largest number of warps of a program.
COLUMNS_OF_WARP = 512
FEWEST_WARPS = 4
MOST_WARPS = 16
# The launch config of a layer norm by a host's rule: one row at a time, because a rotated row takes many registers.
HOSTS_LAYER_NORM = 1, 4
# The size of the groups that our kernels rotate; see QuantizedWeight.rotation.
GROUP = 256
# The oldest compute capability on which matrix products (Rule.MATRIX) are the fastest way to rotate rows.
HAS_MATRIX_UNITS = (8, 0)
# The widest rows, in numbers, of norms with modulation, of which one program holds a whole row; and of gated units with
# fewer warps than MOST_WARPS.
WIDEST_NORM = 8192


class Norm(IntEnum):
    """The norm that the kernel norm_row computes after adding the update to the residual: see source/rounding.py."""

    NO_NORM = 0
    LAYER = 1
    RMS = 2


class Rule(IntEnum):
    """How int8 rows are rounded: see source/hosts_rule.py.

    OURS: for weights that Low-bit has quantized.
    HOSTS: as the hosts round the input of a weight that is stored in INT8.
    BUTTERFLIES, MATRIX: as HOSTS, after a rotation of the rows (ConvRot), which BUTTERFLIES computes by sums and
    differences, and MATRIX by matrix units.
    """

    OURS = 0
    HOSTS = 1
    BUTTERFLIES = 2
    MATRIX = 3


def rule_of(weight: QuantizedWeight, device: torch.device) -> Rule:
    """The rule for the input of a layer with this 8-bit weight: Rule.OURS if Low-bit has quantized the weight, or if it
    is in float8; otherwise hosts_rule(). If the weight is rotated in groups of another size than GROUP, the rule does
    not include the rotation: the caller must rotate the rows first."""
    is_ours = not weight.stored or weight.values.dtype.is_floating_point
    return Rule.OURS if is_ours else hosts_rule(weight.rotation, device)


def hosts_rule(rotation: int, device: torch.device) -> Rule:
    """The rule for the input of a layer whose weight the host stores in INT8. rotation: see QuantizedWeight. If it is
    GROUP, the rule rotates: MATRIX from HAS_MATRIX_UNITS on, BUTTERFLIES on older GPUs. For any other rotation, and for
    none (0), HOSTS."""
    if rotation != GROUP:
        return Rule.HOSTS
    has_units = device.type == "cuda" and torch.cuda.get_device_capability(device) >= HAS_MATRIX_UNITS
    return Rule.MATRIX if has_units else Rule.BUTTERFLIES


def layer_norm(
    residual: Residual, weight: Tensor, bias: Tensor | None, eps: float, kind: Kind,
    config: LaunchConfig = LAYER_NORM.candidates[0], rule: Rule = Rule.OURS, is_plain_too: bool = False,
) -> tuple[Residual, QuantizedTokens]:
    """The residual with its update added and its biases joined to one deferred_bias (float32), and its layer norm in an
    8-bit format.

    In float8, the norm has one scale, which depends only on weight and bias. config: the launch config for Rule.OURS;
    the other rules have only one. is_plain_too: also return the norm in the model's dtype, as QuantizedTokens.plain;
    not for Rule.OURS.

    Adds the update to the residual's tokens in place. Tokens, update and update_scales must be contiguous.
    """
    tokens, deferred_bias, addend, update, update_scales = residual[:5]
    width = tokens.shape[-1]
    rows_together, warps = config if rule == Rule.OURS else HOSTS_LAYER_NORM
    normed = empty_rows(tokens, width, kind, one_scale=kind.dtype.is_floating_point)
    plain = torch.empty_like(tokens, dtype=weight.dtype) if is_plain_too else None
    rows = len(normed.values)
    deferred_now = torch.empty(width, device=tokens.device, dtype=torch.float32)
    # Kernels are compiled for sets of dtypes: a tensor of the right dtype replaces each one that is missing.
    launch(
        "rounding.layer_norm_rows", (ceil_div(rows, rows_together),), tokens, tokens if update is None else update,
        deferred_now if update_scales is None else update_scales,
        deferred_now if deferred_bias is None else deferred_bias, weight if addend is None else addend, weight,
        weight if bias is None else bias, deferred_now, normed.values, normed.scales,
        weight if plain is None else plain, rows, width, int(deferred_bias is not None), int(addend is not None),
        int(update is not None), int(update_scales is not None), int(bias is not None), eps, (width - 1) ** 0.5,
        kind.largest, warps=warps, BLOCK=power_of_two(width), ROWS=rows_together, RULE=int(rule), PLAIN=is_plain_too,
    )
    return Residual(tokens, deferred_now), normed._replace(plain=plain)


def residual_norm(
    residual: Residual, layer: LayerWeights | None, norm: AdaptiveNorm | RMSNorm, modulation: Modulation | None,
    dtype: torch.dtype, kind: Kind | None, rule: Rule = Rule.OURS, is_plain_too: bool = False,
) -> tuple[Residual, Tensor | QuantizedTokens]:
    """The residual with its update added, and its norm with modulation, in an 8-bit format or, if kind is None, in the
    model's dtype. Only for inputs that has_norm_kernel accepts.

    layer: the norm's weight; None for an AdaptiveNorm. modulation: None if there is none. dtype: the model's. In
    float8, the norm has one scale, which depends only on weight and modulation. is_plain_too: also return the norm in
    the model's dtype, as QuantizedTokens.plain; not for Rule.OURS.

    Adds the update to the residual's tokens in place. Tokens, update and update_scales must be contiguous, and there
    must be no biases.
    """
    tokens = residual.tokens
    width = tokens.shape[-1]
    plain = torch.empty_like(tokens, dtype=dtype) if is_plain_too else None
    if kind is None:
        normed: Any = torch.empty_like(tokens, dtype=dtype)
        values = normed
        scales = None
    else:
        normed = empty_rows(tokens, width, kind, one_scale=kind.dtype.is_floating_point)
        values = normed.values
        scales = normed.scales
        normed = normed._replace(plain=plain)
    kind_of_norm = Norm.RMS if isinstance(norm, RMSNorm) else Norm.LAYER
    if kind is not None and scales is not None and kind.dtype.is_floating_point:
        launch_scale(scales, layer, norm, modulation, dtype, len(tokens), kind)
    launch_norm(residual, layer, norm, modulation, kind_of_norm, values, scales, plain, dtype, kind, rule)
    return Residual(tokens), normed


def add_update(residual: Residual, dtype: torch.dtype) -> None:
    """Add the residual's update to its tokens in place, with the update's scales, norm and gate, by the kernel of
    residual_norm. The residual itself still has the update, so the caller must drop it (residuals.without_update).
    dtype: the gate's. Only for residuals that has_norm_kernel accepts."""
    launch_norm(residual, None, None, None, Norm.NO_NORM, None, None, None, dtype, None, Rule.OURS)


def launch_norm(
    residual: Residual, layer: LayerWeights | None, norm: AdaptiveNorm | RMSNorm | None, modulation: Modulation | None,
    kind_of_norm: Norm, values: Tensor | None, scales: Tensor | None, plain: Tensor | None, dtype: torch.dtype,
    kind: Kind | None, rule: Rule,
) -> None:
    """Launch the kernel of residual_norm and add_update. It adds the residual's update to the tokens in place, and
    writes the norm to values.

    layer: the norm's weight; None without one. norm, modulation: None if there are none.
    values: None for Norm.NO_NORM. kind: the format of values; None: the model's dtype (dtype).
    scales: in int8, the scale of each row, which is written; in float8, the one scale, which launch_scale has written;
        None in the model's dtype.
    plain: the norm in the model's dtype, which is written besides values; None if not wanted.
    """
    tokens, _, _, update, update_scales, gate, update_norm = residual
    batch, count, width = tokens.shape
    # Kernels are compiled for sets of dtypes: a tensor of the right dtype replaces each one that is missing.
    vector = torch.empty(0, device=tokens.device, dtype=dtype)
    no_scales = torch.empty(0, device=tokens.device, dtype=torch.float32)
    factor, shift = modulation or (None, None)
    weights = [] if layer is None else [layer.weight]
    if update_norm is not None:
        weights.append(update_norm[0].weight)
    # Both weights have one dtype, so either replaces the other.
    weight = weights[0] if weights else vector
    update_norm_weight = weights[-1] if weights else vector
    launch(
        "rounding.norm_row", (batch * count,), tokens, vector if update is None else update,
        no_scales if update_scales is None else update_scales, update_norm_weight, vector if gate is None else gate,
        weight, vector if factor is None else factor, vector if shift is None else shift,
        vector if values is None else values,
        no_scales if scales is None else scales, vector if plain is None else plain, width, count,
        *(0 if one is None or batch == 1 else one.stride(0) for one in (gate, factor, shift)),
        *(int(one is not None) for one in (update, update_scales, gate, update_norm, factor, shift)),
        0.0 if update_norm is None else update_norm[1].eps,
        0.0 if update_norm is None else float(update_norm[1].plus_one),
        float(isinstance(norm, RMSNorm) and norm.plus_one), 0.0 if norm is None else norm.eps,
        0.0 if kind is None else kind.largest, warps=warps_for(width, MOST_WARPS), BLOCK=power_of_two(width),
        RULE=int(rule), PLAIN=plain is not None, NORM=int(kind_of_norm),
    )


def launch_scale(
    scale: Tensor, layer: LayerWeights | None, norm: AdaptiveNorm | RMSNorm, modulation: Modulation | None,
    dtype: torch.dtype, batch: int, kind: Kind,
) -> None:
    """Launch the kernel that writes the scale of a norm in float8 to `scale` (1, 1). The scale is computed from the
    largest value that the norm can have with these weights and this modulation, whatever the tokens. batch: the batch
    size of the modulation."""
    width = norm.width
    vector = torch.empty(0, device=scale.device, dtype=dtype)
    factor, shift = modulation or (None, None)
    is_rms = isinstance(norm, RMSNorm)
    launch(
        "rounding.scale_of_norms", (1,), vector if layer is None else layer.weight,
        vector if factor is None else factor, vector if shift is None else shift, scale,
        1 if modulation is None else batch, width,
        *(0 if one is None or batch == 1 else one.stride(0) for one in (factor, shift)), int(factor is not None),
        int(shift is not None), float(isinstance(norm, RMSNorm) and norm.plus_one),
        (width if is_rms else width - 1) ** 0.5, kind.largest, warps=warps_for(width, MOST_WARPS),
        BLOCK=power_of_two(width), NORM=int(Norm.RMS if is_rms else Norm.LAYER),
    )


def has_norm_kernel(
    residual: Residual, layer: LayerWeights | None, norm: Any, modulation: Modulation | None, dtype: torch.dtype
) -> bool:
    """Whether the kernel of residual_norm supports these inputs; with norm and layer None, whether the kernel of
    add_update does.

    The kernel supports AdaptiveNorm and RMSNorm; tokens (batch, tokens, width) of at most WIDEST_NORM, in the model's
    dtype, or in float32 if the model's dtype is float16; and gates and modulations in the model's dtype. An update with
    a norm is supported before an RMSNorm alone, and in add_update. The weights of the norm and of the update's norm
    must both be in the model's dtype, or both in float32.
    """
    tokens = residual.tokens
    kept = torch.float32 if dtype == torch.float16 else dtype
    if tokens.dim() != 3 or tokens.shape[-1] > WIDEST_NORM or tokens.dtype != kept:
        return False
    weights = [] if layer is None else [layer.weight]
    if isinstance(norm, RMSNorm) == (layer is None) or not isinstance(norm, AdaptiveNorm | RMSNorm | None):
        return False
    if residual.norm is not None:
        if isinstance(norm, AdaptiveNorm):
            return False
        weights.append(residual.norm[0].weight)
    if any(weight.dtype not in (dtype, torch.float32) or weight.dtype != weights[0].dtype for weight in weights):
        return False
    vectors = [one for one in (residual.gate, *(modulation or ())) if one is not None]
    return all(vector.dtype == dtype and vector.stride(-1) == 1 for vector in vectors)


def gated(
    numbers: Tensor, gates: Tensor, activation: Activation, kind: Kind, rule: Rule = Rule.OURS,
    is_plain_too: bool = False,
) -> QuantizedTokens:
    """numbers * activation(gates), both (..., n), in an 8-bit format with one scale for each row. activation: one of
    tokens.ACTIVATIONS. is_plain_too: also return the same numbers in the inputs' dtype, as QuantizedTokens.plain; not
    for Rule.OURS."""
    width = numbers.shape[-1]
    output = empty_rows(numbers, width, kind)
    plain = numbers.new_empty(numbers.shape) if is_plain_too else None
    numbers, numbers_stride = rows_in_memory(numbers)
    gates, gates_stride = rows_in_memory(gates)
    block = 1 << (width.bit_length() - 1)
    launch(
        "rounding.gated_row", (len(output.values),), numbers, gates, output.values, output.scales,
        output.scales if output.unit is None else output.unit, numbers if plain is None else plain, width,
        numbers_stride, gates_stride, kind.largest, warps=MOST_WARPS if block > WIDEST_NORM else warps_for(width),
        BLOCK=block, REST=0 if block == width else power_of_two(width - block), RULE=int(rule), PLAIN=is_plain_too,
        ACTIVATION=ACTIVATIONS.index(activation),
    )
    return output._replace(plain=plain)


def geglu(tokens: Tensor, kind: Kind, rule: Rule = Rule.OURS, is_plain_too: bool = False) -> QuantizedTokens:
    """As gated, for the halves of tokens (..., 2 n): the first half times the GELU (erf form) of the second."""
    numbers, gates = tokens.chunk(2, dim=-1)
    return gated(numbers, gates, Activation.GELU, kind, rule, is_plain_too)


def rounded(tokens: Tensor, kind: Kind, gelu: bool = False, rule: Rule = Rule.OURS) -> QuantizedTokens:
    """Tokens (..., n), or with gelu their GELU (erf form), quantized to an 8-bit format with one scale for each row.
    The given tokens do not change."""
    output = empty_rows(tokens, tokens.shape[-1], kind)
    rows = tokens.contiguous().flatten(0, -2)
    launch_rows(rows, output.values, output.scales, output.unit, gelu=gelu, rule=rule)
    return output


def gelu_and_rounded(tokens: Tensor, rule: Rule) -> QuantizedTokens:
    """The GELU (erf form) of contiguous tokens (..., n) in int8. rule: not Rule.OURS. Overwrites the tokens with their
    GELU in the model's dtype, and returns them as QuantizedTokens.plain."""
    output = empty_rows(tokens, tokens.shape[-1], INT8)._replace(plain=tokens)
    width = tokens.shape[-1]
    launch(
        "rounding.gelu_and_rounded_row", (len(output.values),), tokens, output.values, output.scales, width,
        warps=warps_for(width), BLOCK=power_of_two(width), RULE=int(rule),
    )
    return output


def rounded_weight(weight: Tensor, kind: Kind) -> QuantizedWeight:
    """A weight (out, in), quantized to an 8-bit format. low_bit.empty_like decides whether the weight has one scale or
    one for each row."""
    room = empty_like(weight, kind)
    rounded_rows(weight, room.values, room.scales)
    return room


def rounded_rows(rows: Tensor, values: Tensor, scales: Tensor) -> None:
    """Quantize rows (rows, width) into the given tensors, which are overwritten: values of the same shape, whose dtype
    decides the format, and float32 scales, one for each row. If scales has fewer numbers than there are rows, all rows
    get one scale."""
    one_scale = scales.numel() < len(rows)
    launch_rows(rows, values, scales, largest_of(rows) if one_scale else torch.empty_like(scales[:1, :1]), one_scale)


def launch_rows(
    rows: Tensor, values: Tensor, scales: Tensor, one: Tensor | None, one_scale: bool = False, gelu: bool = False,
    rule: Rule = Rule.OURS,
) -> None:
    """Launch the kernel that quantizes rows (rows, width), or with gelu their GELU, into values and scales.

    one: if one_scale, the largest magnitude in all rows, which the kernel reads; otherwise, for float8, the tensor
    (1, 1) to which the kernel writes the number 1 (QuantizedTokens.unit), and None for int8.
    """
    kind = kind_of(values)
    width = rows.shape[1]
    launch(
        "rounding.plain_row", (len(rows),), rows, values, scales, scales if one is None else one, width, kind.largest,
        warps=warps_for(width), BLOCK=power_of_two(width), ONE_SCALE=one_scale, GELU=gelu, RULE=int(rule),
    )


def warps_for(width: int, most: int = 8) -> int:
    """The number of warps of a program that processes a row of this width: from FEWEST_WARPS to `most`."""
    return min(most, max(FEWEST_WARPS, power_of_two(width) // COLUMNS_OF_WARP))


def empty_rows(tokens: Tensor, width: int, kind: Kind, one_scale: bool = False) -> QuantizedTokens:
    """Uninitialised QuantizedTokens, with a row of this width for each of the tokens (..., n). one_scale: with one
    scale for all rows; otherwise with one scale for each row and, in float8, a unit."""
    shape = tokens.shape[:-1]
    values = torch.empty((shape.numel(), width), device=tokens.device, dtype=kind.dtype)
    scales = torch.empty((1 if one_scale else len(values), 1), device=tokens.device, dtype=torch.float32)
    unit = None if one_scale or not kind.dtype.is_floating_point else torch.empty_like(scales[:1])
    return QuantizedTokens(values, scales, tuple(shape), unit)

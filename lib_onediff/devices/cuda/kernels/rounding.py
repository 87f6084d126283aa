"""Rows of tokens in eight bits, made where they are computed: norms, gated units, and plain rows; and weights. Norms
with modulation, and root mean square norms, come in 16 bits too.

A norm's rows in float8 share one scale, all others have one each. Rows of int8 are rounded by a Rule.
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

# Of a row, the columns that a warp holds in its registers; and the fewest warps and the most.
COLUMNS_OF_WARP = 512
FEWEST_WARPS = 4
MOST_WARPS = 16
# Rows and warps of a layer norm by a host's rule: a rotated row takes many registers.
HOSTS_LAYER_NORM = 1, 4
# The groups of ConvRot that kernels rotate.
GROUP = 256
HAS_MATRIX_UNITS = (8, 0)
# The widest rows of a norm with modulation, of which a program holds one; wider rows take all warps.
WIDEST_NORM = 8192


class Norm(IntEnum):
    """What follows the sum of a residual's row and its update: see source/rounding.py."""

    NO_NORM = 0
    LAYER = 1
    RMS = 2


class Rule(IntEnum):
    """How rows of int8 are rounded: see source/hosts_rule.py."""

    OURS = 0
    HOSTS = 1
    BUTTERFLIES = 2
    MATRIX = 3


def rule_of(weight: QuantizedWeight, device: torch.device) -> Rule:
    """The rule for rows that are multiplied with a weight. Rows of groups that no kernel rotates are rotated before."""
    is_ours = not weight.stored or weight.values.dtype.is_floating_point
    return Rule.OURS if is_ours else hosts_rule(weight.rotation, device)


def hosts_rule(rotation: int, device: torch.device) -> Rule:
    """The rule for rows that are multiplied with a weight that is stored in INT8. rotation: as QuantizedWeight's."""
    if rotation != GROUP:
        return Rule.HOSTS
    has_units = device.type == "cuda" and torch.cuda.get_device_capability(device) >= HAS_MATRIX_UNITS
    return Rule.MATRIX if has_units else Rule.BUTTERFLIES


def layer_norm(
    residual: Residual, weight: Tensor, bias: Tensor | None, eps: float, kind: Kind,
    config: LaunchConfig = LAYER_NORM.candidates[0], rule: Rule = Rule.OURS, is_plain_too: bool = False,
) -> tuple[Residual, QuantizedTokens]:
    """The residual, deferred_bias one vector in float32 and no update, and its layer norm in a kind of eight bits: in
    float8 by one scale, which weight and bias alone decide. config: for our own rule; the others have one.
    is_plain_too: also in the model's dtype, by a host's rule.

    Writes the update into the residual's tokens, where there is one. Tokens, update and its scales must be contiguous.
    """
    tokens, deferred_bias, addend, update, update_scales = residual[:5]
    width = tokens.shape[-1]
    rows_together, warps = config if rule == Rule.OURS else HOSTS_LAYER_NORM
    normed = empty_rows(tokens, width, kind, one_scale=kind.dtype.is_floating_point)
    plain = torch.empty_like(tokens, dtype=weight.dtype) if is_plain_too else None
    rows = len(normed.values)
    deferred_now = torch.empty(width, device=tokens.device, dtype=torch.float32)
    # There is a kernel for each set of types: what is not there is stood for by something of its type.
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
    """The residual without update, and its norm with modulation: in a kind of eight bits, in float8 by one scale which
    weight and modulation alone decide, or in dtype. Only for what has_norm_kernel accepts. layer: the norm's weight,
    None for an AdaptiveNorm. is_plain_too: in both, by a host's rule.

    Writes the update into the residual's tokens, where there is one. Tokens, update and its scales must be contiguous,
    nothing deferred.
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
    """Writes the residual's update into its tokens, by the norm's kernel. dtype: of its gate. Only for what
    has_norm_kernel accepts."""
    launch_norm(residual, None, None, None, Norm.NO_NORM, None, None, None, dtype, None, Rule.OURS)


def launch_norm(
    residual: Residual, layer: LayerWeights | None, norm: AdaptiveNorm | RMSNorm | None, modulation: Modulation | None,
    kind_of_norm: Norm, values: Tensor | None, scales: Tensor | None, plain: Tensor | None, dtype: torch.dtype,
    kind: Kind | None, rule: Rule,
) -> None:
    tokens, _, _, update, update_scales, gate, behind = residual
    batch, count, width = tokens.shape
    # There is a kernel for each set of types: what is not there is stood for by something of its type.
    vector = torch.empty(0, device=tokens.device, dtype=dtype)
    no_scales = torch.empty(0, device=tokens.device, dtype=torch.float32)
    factor, shift = modulation or (None, None)
    of_behind = None if behind is None else behind[0].weight
    weight = None if layer is None else layer.weight
    weight = vector if weight is None and of_behind is None else of_behind if weight is None else weight
    assert weight is not None
    launch(
        "rounding.norm_row", (batch * count,), tokens, vector if update is None else update,
        no_scales if update_scales is None else update_scales, weight if of_behind is None else of_behind,
        vector if gate is None else gate, weight, vector if factor is None else factor,
        vector if shift is None else shift, vector if values is None else values,
        no_scales if scales is None else scales, vector if plain is None else plain, width, count,
        *(0 if one is None or batch == 1 else one.stride(0) for one in (gate, factor, shift)),
        *(int(one is not None) for one in (update, update_scales, gate, behind, factor, shift)),
        0.0 if behind is None else behind[1].eps, 0.0 if behind is None else float(behind[1].plus_one),
        float(isinstance(norm, RMSNorm) and norm.plus_one), 0.0 if norm is None else norm.eps,
        0.0 if kind is None else kind.largest, warps=warps_for(width, MOST_WARPS), BLOCK=power_of_two(width),
        RULE=int(rule), PLAIN=plain is not None, NORM=int(kind_of_norm),
    )


def launch_scale(
    scale: Tensor, layer: LayerWeights | None, norm: AdaptiveNorm | RMSNorm, modulation: Modulation | None,
    dtype: torch.dtype, batch: int, kind: Kind,
) -> None:
    """The scale (1, 1) of a norm's rows in float8, for so many images."""
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
    """Whether residual_norm takes these: a norm without weight or the root mean square norm with one, of tokens (batch,
    tokens, width) in the model's dtype, or in float32 beside float16; vectors in the model's dtype, and norms' weights
    in that or in float32, all of them in one. norm: None of add_update."""
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
    """numbers * activation(gates), (..., n) of the same shape, in a kind of eight bits. is_plain_too: also in the
    tokens' dtype, by a host's rule. activation: one of tokens.ACTIVATIONS."""
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
    """As gated, of the halves of (..., 2 n): the first half times the GELU (erf form) of the second."""
    numbers, gates = tokens.chunk(2, dim=-1)
    return gated(numbers, gates, Activation.GELU, kind, rule, is_plain_too)


def rounded(tokens: Tensor, kind: Kind, gelu: bool = False, rule: Rule = Rule.OURS) -> QuantizedTokens:
    """Tokens (..., n), or the GELU (erf form) of them, in a kind of eight bits."""
    output = empty_rows(tokens, tokens.shape[-1], kind)
    rows = tokens.contiguous().flatten(0, -2)
    launch_rows(rows, output.values, output.scales, output.unit, gelu=gelu, rule=rule)
    return output


def gelu_and_rounded(tokens: Tensor, rule: Rule) -> QuantizedTokens:
    """The GELU (erf form) of tokens (..., n), contiguous: in their place, and in int8 by a host's rule."""
    output = empty_rows(tokens, tokens.shape[-1], INT8)._replace(plain=tokens)
    width = tokens.shape[-1]
    launch(
        "rounding.gelu_and_rounded_row", (len(output.values),), tokens, output.values, output.scales, width,
        warps=warps_for(width), BLOCK=power_of_two(width), RULE=int(rule),
    )
    return output


def rounded_weight(weight: Tensor, kind: Kind) -> QuantizedWeight:
    """A weight (out, in) in a kind of eight bits."""
    room = empty_like(weight, kind)
    rounded_rows(weight, room.values, room.scales)
    return room


def rounded_rows(rows: Tensor, values: Tensor, scales: Tensor) -> None:
    """Round rows, (rows, width), into tensors that are there: values of the same shape, whose type is the kind, and
    scales in float32 that give them back, of as many numbers as rows, or of one."""
    one_scale = scales.numel() < len(rows)
    launch_rows(rows, values, scales, largest_of(rows) if one_scale else torch.empty_like(scales[:1, :1]), one_scale)


def launch_rows(
    rows: Tensor, values: Tensor, scales: Tensor, one: Tensor | None, one_scale: bool = False, gelu: bool = False,
    rule: Rule = Rule.OURS,
) -> None:
    """one: see plain_row; None for int8, which has no unit."""
    kind = kind_of(values)
    width = rows.shape[1]
    launch(
        "rounding.plain_row", (len(rows),), rows, values, scales, scales if one is None else one, width, kind.largest,
        warps=warps_for(width), BLOCK=power_of_two(width), ONE_SCALE=one_scale, GELU=gelu, RULE=int(rule),
    )


def warps_for(width: int, most: int = 8) -> int:
    return min(most, max(FEWEST_WARPS, power_of_two(width) // COLUMNS_OF_WARP))


def empty_rows(tokens: Tensor, width: int, kind: Kind, one_scale: bool = False) -> QuantizedTokens:
    """As many rows as there are tokens, of another width."""
    shape = tokens.shape[:-1]
    values = torch.empty((shape.numel(), width), device=tokens.device, dtype=kind.dtype)
    scales = torch.empty((1 if one_scale else len(values), 1), device=tokens.device, dtype=torch.float32)
    unit = None if one_scale or not kind.dtype.is_floating_point else torch.empty_like(scales[:1])
    return QuantizedTokens(values, scales, tuple(shape), unit)

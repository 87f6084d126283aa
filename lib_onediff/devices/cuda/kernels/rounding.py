"""Rows of tokens in eight bits, made where they are computed: layer norm, GEGLU, and plain rows; and weights. The
adaptive norm gives them in 16 bits too.

A layer norm's rows in float8 share one scale, all others have one each. Rows of int8 are rounded by a Rule.
"""
from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from ....core.layer_weights import QuantizedWeight
from ....core.operators import Modulation, QuantizedTokens, Residual
from ....weights.low_bit import INT8, Kind, empty_like, kind_of, largest_of
from .launch_config import LAYER_NORM, LaunchConfig
from .launching import ceil_div, launch, power_of_two

# Columns that four warps hold in their registers.
FEW_COLUMNS = 2048
# Rows and warps of a layer norm by a host's rule: a rotated row takes many registers.
HOSTS_LAYER_NORM = 1, 4
# The groups of ConvRot that kernels rotate.
GROUP = 256
HAS_MATRIX_UNITS = (8, 0)


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
    config: LaunchConfig = LAYER_NORM.candidates[0], rule: Rule = Rule.OURS,
) -> tuple[Residual, QuantizedTokens]:
    """The residual, deferred_bias one vector in float32 and no update, and its layer norm in a kind of eight bits: in
    float8 by one scale, which weight and bias alone decide. config: for our own rule; the others have one.

    Writes the update into the residual's tokens, where there is one. Tokens, update and its scales must be contiguous.
    """
    tokens, deferred_bias, addend, update, update_scales = residual[:5]
    width = tokens.shape[-1]
    rows_together, warps = config if rule == Rule.OURS else HOSTS_LAYER_NORM
    normed = empty_rows(tokens, width, kind, one_scale=kind.dtype.is_floating_point)
    rows = len(normed.values)
    deferred_now = torch.empty(width, device=tokens.device, dtype=torch.float32)
    # There is a kernel for each set of types: what is not there is stood for by something of its type.
    launch(
        "rounding.layer_norm_rows", (ceil_div(rows, rows_together),), tokens, tokens if update is None else update,
        deferred_now if update_scales is None else update_scales,
        deferred_now if deferred_bias is None else deferred_bias, weight if addend is None else addend, weight,
        weight if bias is None else bias, deferred_now, normed.values, normed.scales, rows, width,
        int(deferred_bias is not None), int(addend is not None), int(update is not None),
        int(update_scales is not None), int(bias is not None), eps, (width - 1) ** 0.5, kind.largest, warps=warps,
        BLOCK=power_of_two(width), ROWS=rows_together, RULE=int(rule),
    )
    return Residual(tokens, deferred_now), normed


def adaptive_norm(
    residual: Residual, modulation: Modulation, eps: float, dtype: torch.dtype, kind: Kind | None,
    rule: Rule = Rule.OURS, is_plain_too: bool = False,
) -> tuple[Residual, Tensor | QuantizedTokens]:
    """The residual without update, and its modulated layer norm: in a kind of eight bits, in float8 by one scale which
    the modulation alone decides, or in dtype. Only for a modulation that has_kernel accepts. is_plain_too: in both, by
    a host's rule.

    Writes the update into the residual's tokens, where there is one. Tokens, update and its scales must be contiguous,
    nothing deferred.
    """
    tokens = residual.tokens
    update = residual.update
    update_scales = residual.update_scales
    gate = residual.gate
    factor, shift = modulation
    assert shift is not None
    batch, count, width = tokens.shape
    plain = torch.empty_like(tokens, dtype=dtype) if is_plain_too else None
    if kind is None:
        normed: Any = torch.empty_like(tokens, dtype=dtype)
        values = scales = normed
    else:
        normed = empty_rows(tokens, width, kind, one_scale=kind.dtype.is_floating_point)
        values = normed.values
        scales = normed.scales
        normed = normed._replace(plain=plain)
    gate = factor if gate is None else gate
    largest = 0.0 if kind is None else kind.largest
    block = power_of_two(width)
    if kind is not None and kind.dtype.is_floating_point:
        launch(
            "rounding.adaptive_scale", (1,), factor, shift, scales, batch, width, factor.stride(0), (width - 1) ** 0.5,
            largest, warps=warps_for(width), BLOCK=block,
        )
    # There is a kernel for each set of types: what is not there is stood for by something of its type.
    launch(
        "rounding.adaptive_norm_row", (batch * count,), tokens, factor if update is None else update,
        scales if update_scales is None else update_scales, gate, factor, shift, values, scales,
        factor if plain is None else plain, width, count, factor.stride(0), gate.stride(0), int(update is not None),
        int(update_scales is not None), eps, largest, warps=warps_for(width), BLOCK=block, RULE=int(rule),
        PLAIN=is_plain_too,
    )
    return Residual(tokens), normed


def has_kernel(modulation: Modulation) -> bool:
    """Whether the adaptive norm's kernel takes it: with a shift, which lies in memory as the scale does, row by row."""
    scale, shift = modulation
    return shift is not None and shift.stride() == scale.stride() and scale.stride(-1) == 1


def geglu(tokens: Tensor, kind: Kind, rule: Rule = Rule.OURS) -> QuantizedTokens:
    """(..., 2 n) -> (..., n) in a kind of eight bits: the first half times the GELU (erf form) of the second."""
    width = tokens.shape[-1] // 2
    output = empty_rows(tokens, width, kind)
    block = 1 << (width.bit_length() - 1)
    launch(
        "rounding.geglu_row", (len(output.values),), tokens, output.values, output.scales,
        output.scales if output.unit is None else output.unit, width, kind.largest, warps=warps_for(width),
        BLOCK=block, REST=0 if block == width else power_of_two(width - block), RULE=int(rule),
    )
    return output


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


def warps_for(width: int) -> int:
    return 4 if width <= FEW_COLUMNS else 8


def empty_rows(tokens: Tensor, width: int, kind: Kind, one_scale: bool = False) -> QuantizedTokens:
    """As many rows as there are tokens, of another width."""
    shape = tokens.shape[:-1]
    values = torch.empty((shape.numel(), width), device=tokens.device, dtype=kind.dtype)
    scales = torch.empty((1 if one_scale else len(values), 1), device=tokens.device, dtype=torch.float32)
    unit = None if one_scale or not kind.dtype.is_floating_point else torch.empty_like(scales[:1])
    return QuantizedTokens(values, scales, tuple(shape), unit)

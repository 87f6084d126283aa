"""Layer norm of a residual stream with a deferred bias, and GEGLU, over rows of tokens."""
from __future__ import annotations

import torch
from torch import Tensor

from ....core.operators import Stream
from .launch_config import GEGLU, LAYER_NORM, LaunchConfig
from .launching import ceil_div, launch, power_of_two


def layer_norm(
    stream: Stream, weight: Tensor, bias: Tensor | None, eps: float, config: LaunchConfig = LAYER_NORM.candidates[0]
) -> tuple[Stream, Tensor]:
    """The stream, its deferred bias as one vector in float32, and its layer norm (..., width), contiguous.

    The deferred bias is added in float32, and is not rounded on the way.
    """
    tokens, deferred_bias, addend = stream[:3]
    width, (rows_together, warps) = tokens.shape[-1], config
    rows = tokens.numel() // width
    output = torch.empty_like(tokens)
    deferred_now = torch.empty(width, device=tokens.device, dtype=torch.float32)
    # There is a kernel for each set of types: what is not there is stood for by something of its type.
    launch(
        "tokens.layer_norm_rows", (ceil_div(rows, rows_together),), tokens,
        deferred_now if deferred_bias is None else deferred_bias, weight if addend is None else addend, weight,
        weight if bias is None else bias, deferred_now, output, rows, width, int(deferred_bias is not None),
        int(addend is not None), int(bias is not None), eps, warps=warps, BLOCK=power_of_two(width),
        ROWS=rows_together,
    )
    return Stream(tokens, deferred_now), output


def materialize(stream: Stream, config: LaunchConfig = LAYER_NORM.candidates[0]) -> Tensor:
    """The tokens with the deferred bias added; the very tokens where there is none."""
    tokens, deferred_bias, addend = stream[:3]
    if deferred_bias is None:
        return tokens if addend is None else tokens + addend
    width, (rows_together, warps) = tokens.shape[-1], config
    rows = tokens.numel() // width
    output = torch.empty_like(tokens)
    launch(
        "tokens.materialize_rows", (ceil_div(rows, rows_together),), tokens, deferred_bias,
        tokens if addend is None else addend, output, rows, width, int(addend is not None), warps=warps,
        BLOCK=power_of_two(width), ROWS=rows_together,
    )
    return output


def geglu(tokens: Tensor, config: LaunchConfig = GEGLU.candidates[0]) -> Tensor:
    """(..., 2 n) -> (..., n), contiguous: the first half times the GELU (erf form) of the second."""
    width = tokens.shape[-1] // 2
    block, warps = config
    output = tokens.new_empty((*tokens.shape[:-1], width))
    rows = tokens.numel() // (2 * width)
    launch("tokens.geglu_row", (rows * ceil_div(width, block),), tokens, output, width, warps=warps, BLOCK=block)
    return output

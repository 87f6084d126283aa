"""Over rows of tokens: layer norm of a residual with a deferred bias, GEGLU, norms of heads, and attention over
few keys."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....core.operators import Heads, Residual
from .launch_config import ATTENTION, GEGLU, LAYER_NORM, LaunchConfig
from .launching import ceil_div, launch, power_of_two

HEADS_WARPS = 4
# Numbers of a block, and its warps.
GELU = 1024, 2
ATTENTION_DTYPES = (torch.float16, torch.bfloat16)
# Of heads, for which there is a kernel: those of SD 1, SD 2 and SDXL.
ATTENTION_WIDTHS = (40, 64, 80, 160)
# exp2 is one instruction, exp is two.
LOG2_E = 1.4426950408889634


def layer_norm(
    residual: Residual, weight: Tensor, bias: Tensor | None, eps: float, config: LaunchConfig = LAYER_NORM.candidates[0]
) -> tuple[Residual, Tensor]:
    """The residual, its deferred bias as one vector in float32, and its layer norm (..., width), contiguous.

    The deferred bias is added in float32, and is not rounded on the way.
    """
    tokens, deferred_bias, addend = residual[:3]
    rows_together, warps = config
    width = tokens.shape[-1]
    rows = tokens.numel() // width
    output = torch.empty_like(tokens)
    deferred_now = torch.empty(width, device=tokens.device, dtype=torch.float32)
    # Kernels are compiled for sets of dtypes: a tensor of the right dtype stands in for each one that is missing.
    launch(
        "tokens.layer_norm_rows", (ceil_div(rows, rows_together),), tokens,
        deferred_now if deferred_bias is None else deferred_bias, weight if addend is None else addend, weight,
        weight if bias is None else bias, deferred_now, output, rows, width, int(deferred_bias is not None),
        int(addend is not None), int(bias is not None), eps, warps=warps, BLOCK=power_of_two(width),
        ROWS=rows_together,
    )
    return Residual(tokens, deferred_now), output


def materialize(residual: Residual, config: LaunchConfig = LAYER_NORM.candidates[0]) -> Tensor:
    """The tokens with the deferred bias and the bias added; the same tensor if there is neither."""
    tokens, deferred_bias, addend = residual[:3]
    if deferred_bias is None:
        return tokens if addend is None else tokens + addend
    rows_together, warps = config
    width = tokens.shape[-1]
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


def gelu(numbers: Tensor) -> Tensor:
    """GELU in its erf form, in place. numbers: contiguous."""
    block, warps = GELU
    launch("tokens.gelu_block", (ceil_div(numbers.numel(), block),), numbers, numbers.numel(), warps=warps, BLOCK=block)
    return numbers


def normed_heads(projected: Tensor, parts: Sequence[Heads]) -> list[Tensor]:
    """See split_heads in core.operators. Only for parts that has_heads_kernel accepts. projected is contiguous, and
    written into."""
    batch, tokens, width = projected.shape
    normed = [part.norm for part in parts if part.norm is not None]
    first, norm = normed[0]
    second, _ = normed[-1]
    heads = parts[0].number
    rotary = parts[0].rotary
    cosines, sines = (first.weight, first.weight) if rotary is None else rotary[:2]
    launch(
        "tokens.normed_heads_row", (batch * tokens,), projected, first.weight, second.weight, cosines, sines, width,
        tokens, heads, int(rotary is not None), norm.eps, warps=HEADS_WARPS, PARTS=len(normed),
        HEADS=power_of_two(heads), HALF=norm.width // 2,
    )
    return list(projected.view(batch, tokens, len(parts), heads, -1).permute(2, 0, 3, 1, 4).unbind())


def has_heads_kernel(parts: Sequence[Heads]) -> bool:
    """Whether the kernel computes these parts: as many heads in each, one or two parts with norms, alike but for their
    weights, over a power of two of numbers, and before the parts without; rotated in halves, all or none, at the same
    places in every row."""
    norms = [part.norm[1] for part in parts if part.norm is not None]
    normed = parts[:len(norms)]
    plain = parts[len(norms):]
    if len(norms) not in (1, 2) or any(part.norm is None for part in normed):
        return False
    first = parts[0]
    norm = norms[0]
    if any((one.width, one.eps, one.plus_one) != (norm.width, norm.eps, False) for one in norms):
        return False
    if norm.width != power_of_two(norm.width):
        return False
    if any(part.number != first.number for part in parts) or any(part.rotary is not first.rotary for part in normed):
        return False
    if any(part.rotary is not None for part in plain):
        return False
    return first.rotary is None or (not first.rotary.interleaved and first.rotary.cosines.dim() == 2)


def attention(query: Tensor, key: Tensor, value: Tensor, config: LaunchConfig = ATTENTION.candidates[0]) -> Tensor:
    """Softmax attention over (batch, heads, tokens, width) in half precision, for parts of one GEMM's output: heads lie
    beside each other in memory. config: queries and keys of a block, warps, and stages of loading.

    In one pass over the keys (flash attention; Dao et al. 2022), for few of them: a cross attention has some 77, which
    one program holds at once; the libraries' kernels are made for thousands, and take twice as long. Sums, the softmax
    among them, are in float32.
    """
    batch, heads, queries, width = query.shape
    output = query.new_empty((batch, queries, heads, width))
    queries_of_block, keys_of_block, warps, stages = config
    launch(
        "attention.attend", (ceil_div(queries, queries_of_block), batch * heads), query, key, value, output, queries,
        key.shape[2], heads, width**-0.5 * LOG2_E, query.stride(0), query.stride(2), key.stride(0), key.stride(2),
        value.stride(0), value.stride(2), warps=warps, stages=stages, WIDTH=width, BLOCK=max(16, power_of_two(width)),
        QUERIES=queries_of_block, KEYS=keys_of_block,
    )
    return output.transpose(1, 2)


def heads_lie_beside(tensor: Tensor) -> bool:
    """Whether the heads of (batch, heads, tokens, width) lie beside each other in memory, as a GEMM leaves them."""
    return tensor.stride(3) == 1 and tensor.stride(1) == tensor.shape[3]

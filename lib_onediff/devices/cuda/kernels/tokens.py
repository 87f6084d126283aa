"""Kernels over rows of tokens: layer norm of a residual with a deferred bias, gated units, norms of heads, and
attention over few keys."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....core.operators import Activation, Heads, Residual
from .launch_config import ATTENTION, GEGLU, LAYER_NORM, LaunchConfig
from .launching import ceil_div, launch, power_of_two

# The number of heads that a program of the kernel for norms of heads processes, and its warps.
HEADS = 16
HEADS_WARPS = 4
# The activations of gated units, in the order of source/tokens.py.
ACTIVATIONS = (Activation.GELU, Activation.SILU, Activation.SIGMOID)
# The block size of the GELU kernel, in numbers, and its warps.
GELU = 1024, 2
# The dtypes of the attention kernel.
ATTENTION_DTYPES = (torch.float16, torch.bfloat16)
# The head widths for which there is an attention kernel: those of SD 1, SD 2 and SDXL.
ATTENTION_WIDTHS = (40, 64, 80, 160)
# Scores are multiplied by this, because the kernel computes exp as exp2, which is one instruction; exp is two.
LOG2_E = 1.4426950408889634


def layer_norm(
    residual: Residual, weight: Tensor, bias: Tensor | None, eps: float, config: LaunchConfig = LAYER_NORM.candidates[0]
) -> tuple[Residual, Tensor]:
    """The residual with its biases joined to one deferred_bias (float32), and its layer norm (..., width), contiguous.

    The norm is that of tokens + deferred_bias + bias, summed in float32 and not rounded before the norm. The tokens
    themselves do not change. The residual must have no update, and its tokens must be contiguous.
    """
    tokens, deferred_bias, addend = residual[:3]
    rows_together, warps = config
    width = tokens.shape[-1]
    rows = tokens.numel() // width
    output = torch.empty_like(tokens)
    deferred_now = torch.empty(width, device=tokens.device, dtype=torch.float32)
    # Kernels are compiled for sets of dtypes: a tensor of the right dtype replaces each one that is missing.
    launch(
        "tokens.layer_norm_rows", (ceil_div(rows, rows_together),), tokens,
        deferred_now if deferred_bias is None else deferred_bias, weight if addend is None else addend, weight,
        weight if bias is None else bias, deferred_now, output, rows, width, int(deferred_bias is not None),
        int(addend is not None), int(bias is not None), eps, warps=warps, BLOCK=power_of_two(width),
        ROWS=rows_together,
    )
    return Residual(tokens, deferred_now), output


def materialize(residual: Residual, config: LaunchConfig = LAYER_NORM.candidates[0]) -> Tensor:
    """The residual's tokens with deferred_bias and bias added, as a new tensor; the tokens themselves if there is
    neither. The residual must have no update."""
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


def gated(
    numbers: Tensor, gates: Tensor, activation: Activation, config: LaunchConfig = GEGLU.candidates[0]
) -> Tensor:
    """numbers * activation(gates), both (..., n), as a contiguous tensor. activation: one of ACTIVATIONS. config:
    (columns, warps) of a program."""
    width = numbers.shape[-1]
    block, warps = config
    output = numbers.new_empty(numbers.shape)
    numbers, numbers_stride = rows_in_memory(numbers)
    gates, gates_stride = rows_in_memory(gates)
    rows = output.numel() // width
    launch(
        "tokens.gated_row", (rows * ceil_div(width, block),), numbers, gates, output, width, numbers_stride,
        gates_stride, warps=warps, BLOCK=block, ACTIVATION=ACTIVATIONS.index(activation),
    )
    return output


def geglu(tokens: Tensor, config: LaunchConfig = GEGLU.candidates[0]) -> Tensor:
    """(..., 2 n) -> (..., n), contiguous: the first half times the GELU (erf form) of the second."""
    numbers, gates = tokens.chunk(2, dim=-1)
    return gated(numbers, gates, Activation.GELU, config)


def rows_in_memory(tokens: Tensor) -> tuple[Tensor, int]:
    """Tokens (..., n) whose rows are contiguous and at equal distances in memory, and that distance, in numbers. The
    same tensor if it has this form already, such as one half of a wider tensor; otherwise a copy."""
    stride = tokens.stride(-2) if tokens.dim() > 1 else tokens.shape[-1]
    expected = stride
    is_regular = tokens.stride(-1) == 1
    for size, found in zip(reversed(tokens.shape[:-1]), reversed(tokens.stride()[:-1]), strict=True):
        is_regular = is_regular and (size == 1 or found == expected)
        expected *= size
    return (tokens, stride) if is_regular else (tokens.contiguous(), tokens.shape[-1])


def gelu(numbers: Tensor) -> Tensor:
    """Apply GELU (erf form) in place to a contiguous tensor, and return it."""
    block, warps = GELU
    launch("tokens.gelu_block", (ceil_div(numbers.numel(), block),), numbers, numbers.numel(), warps=warps, BLOCK=block)
    return numbers


def normed_heads(projected: Tensor, parts: Sequence[Heads]) -> list[Tensor]:
    """One tensor (batch, heads, tokens, head width) for each part of projected (batch, tokens, heads of all parts *
    head width), with the part's norm and rotary embedding applied; see Operators.split_heads. Overwrites `projected`:
    the results are views of it. Only for inputs that has_heads_kernel accepts."""
    batch, tokens, _ = projected.shape
    normed = [part for part in parts if part.norm is not None]
    first, norm = normed[0].norm or (None, None)
    second, _ = normed[-1].norm or (None, None)
    assert first is not None and second is not None and norm is not None
    rotary = normed[0].rotary
    cosines, sines = (first.weight, first.weight) if rotary is None else rotary[:2]
    angle_rows = tokens if rotary is None else cosines.numel() // cosines.shape[-1]
    numbers = [part.number for part in normed]
    blocks = sum(ceil_div(number, HEADS) for number in numbers)
    launch(
        "tokens.normed_heads_row", (batch * tokens * blocks,), projected, first.weight, second.weight, cosines, sines,
        projected.stride(1), angle_rows, numbers[0], sum(numbers[1:]), int(rotary is not None), norm.eps,
        float(norm.plus_one), warps=HEADS_WARPS, HEADS=HEADS, HALF=norm.width // 2,
        INTERLEAVED=rotary is not None and rotary.interleaved,
    )
    together = projected.unflatten(-1, (sum(part.number for part in parts), -1)).transpose(1, 2)
    return list(together.split([part.number for part in parts], dim=1))


def has_heads_kernel(projected: Tensor, parts: Sequence[Heads]) -> bool:
    """Whether the kernel of normed_heads supports these inputs.

    One or two parts must have a norm, and come before the parts without a norm. These norms may differ only in the
    values of their weights, and the head width must be a power of two. Either all parts with a norm have the same
    rotary embedding, or none has one; parts without a norm have none. projected may be a slice of a wider product.
    """
    norms = [part.norm for part in parts if part.norm is not None]
    normed = parts[:len(norms)]
    plain = parts[len(norms):]
    if len(norms) not in (1, 2) or any(part.norm is None for part in normed):
        return False
    layer, norm = norms[0]
    if any((one.width, one.eps, one.plus_one) != (norm.width, norm.eps, norm.plus_one) for _, one in norms):
        return False
    if norm.width != power_of_two(norm.width) or norms[-1][0].weight.dtype != layer.weight.dtype:
        return False
    rotary = normed[0].rotary
    if any(part.rotary is not rotary for part in normed) or any(part.rotary is not None for part in plain):
        return False
    if rotary is not None and not (rotary.cosines.is_contiguous() and rotary.sines.is_contiguous()):
        return False
    batch, tokens, _ = projected.shape
    return projected.stride(2) == 1 and (batch == 1 or projected.stride(0) == tokens * projected.stride(1))


def attention(query: Tensor, key: Tensor, value: Tensor, config: LaunchConfig = ATTENTION.candidates[0]) -> Tensor:
    """Softmax attention over (batch, heads, tokens, width) in half precision, with scores scaled by width**-0.5, in one
    pass over the keys (flash attention; Dao et al. 2022). Sums and the softmax are in float32. The result is (batch,
    heads, queries, width), a view of contiguous (batch, queries, heads, width).

    It is for cross-attentions, which have few keys (some 77): the kernels of libraries are made for thousands of keys,
    and take twice as long. There must be as many heads of keys as of queries, and the heads of a token must be adjacent
    in memory (heads_lie_beside). config: see launch_config.ATTENTION, but not LIBRARY.
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
    """Whether the heads of a token of (batch, heads, tokens, width) are adjacent in memory, as in the output of a GEMM
    over (batch, tokens, heads * width)."""
    return tensor.stride(3) == 1 and tensor.stride(1) == tensor.shape[3]

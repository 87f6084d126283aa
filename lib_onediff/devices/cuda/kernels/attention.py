"""Attention in one pass over the keys (flash attention; Dao et al. 2022), cut for few of them.

A cross attention has some 77 keys, which one program holds at once; the libraries' kernels are made for thousands, and
take twice as long. Sums, the softmax among them, are in float32.
"""
from __future__ import annotations

import torch
from torch import Tensor

from .launch_config import ATTENTION, LaunchConfig
from .launching import ceil_div, launch, power_of_two

DTYPES = (torch.float16, torch.bfloat16)
# Of heads, for which there is a kernel: those of SD 1, SD 2 and SDXL.
WIDTHS = (40, 64, 80, 160)
# exp2 is one instruction, exp is two.
LOG2_E = 1.4426950408889634


def attention(query: Tensor, key: Tensor, value: Tensor, config: LaunchConfig = ATTENTION.candidates[0]) -> Tensor:
    """Softmax attention over (batch, heads, tokens, width) in half precision, for parts of one GEMM's output: heads lie
    beside each other in memory. config: queries and keys of a block, warps, and stages of loading.
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

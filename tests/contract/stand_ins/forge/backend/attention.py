"""Forge's attention functions."""
from __future__ import annotations

from typing import Any

import torch
from stand_in_engine import attention_of_heads, attention_of_pixels
from torch import Tensor


def get_attn_precision(attn_precision: Any = torch.float32) -> Any:
    return attn_precision


def attention_pytorch(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Any = None) -> Tensor:
    return attention_of_heads(q, k, v, heads)


def pytorch_attention_single_head_spatial(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_of_pixels(q, k, v)


attention_function = attention_pytorch
attention_function_single_head_spatial = pytorch_attention_single_head_spatial

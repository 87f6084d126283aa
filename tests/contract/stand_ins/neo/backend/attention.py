"""Neo's attention functions: the VAE's has another name, and the precision asks for the type of the inputs."""
from __future__ import annotations

from typing import Any

from stand_in_engine import attention_of_heads, attention_of_pixels
from torch import Tensor


def get_attn_precision(attn_precision: Any, current_dtype: Any) -> Any:
    return None


def attention_pytorch(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Any = None, **others: Any) -> Tensor:
    return attention_of_heads(q, k, v, heads)


def pytorch_attention_vae(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_of_pixels(q, k, v)


attention_function = attention_pytorch
attention_function_vae = pytorch_attention_vae

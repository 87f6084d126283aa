"""reForge's attention functions, which are ComfyUI's."""
from __future__ import annotations

from typing import Any

from ldm.modules import attention
from stand_in_engine import attention_of_heads
from torch import Tensor


def get_attn_precision(attn_precision: Any, current_dtype: Any) -> Any:
    return attn_precision


def attention_pytorch(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Any = None, **others: Any) -> Tensor:
    return attention_of_heads(q, k, v, heads)


optimized_attention = attention_pytorch


class CrossAttention(attention.CrossAttention):
    def forward(
        self, x: Any, context: Any = None, value: Any = None, mask: Any = None, transformer_options: Any = None
    ) -> Tensor:
        context = x if context is None else context
        return self.to_out(optimized_attention(self.to_q(x), self.to_k(context), self.to_v(context), self.heads))

"""reForge's VAE, which is ComfyUI's, made from the stand-in for Forge's VAE: each attention block keeps the attention
function that was chosen when the block was made."""
from __future__ import annotations

from typing import Any

from stand_in_engine import attention_of_pixels, code_of, in_own_classes
from torch import Tensor


def pytorch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_of_pixels(q, k, v)


def with_own_attention(part: Any) -> None:
    """Give a part of the VAE this file's classes, and its attention block the attention function as an attribute."""
    in_own_classes(part, globals())
    part.mid.attn_1.optimized_attention = pytorch_attention


code_of(
    "forge/backend/nn/vae.py", globals(), ("from backend.attention import attention_function_single_head_spatial", ""),
    ("attention_function_single_head_spatial", "self.optimized_attention"),
    ("in_own_classes(self, globals())", "with_own_attention(self)"),
)

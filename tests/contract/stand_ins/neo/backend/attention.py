"""Neo's attention functions, made of Forge's source. attention_pytorch is decorated and has a parameter skip_reshape,
the VAE's function has another name, and get_attn_precision also takes a dtype."""
from __future__ import annotations

from functools import wraps
from typing import Any

from stand_in_engine import code_of


def wrap_attn(function: Any) -> Any:
    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


code_of(
    "forge/backend/attention.py", globals(), ("attention_function_single_head_spatial", "attention_function_vae"),
    ("attn_precision: Any = torch.float32)", "attn_precision: Any, current_dtype: Any)"),
    ("return attn_precision", "return None"), ("k, v, heads)", "k, v, heads, skip_reshape)"),
    ("mask: Any = None)", "mask: Any = None, skip_reshape: bool = False, **others: Any)"),
    ("def attention_pytorch", "@wrap_attn\ndef attention_pytorch"),
)

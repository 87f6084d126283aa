"""Neo's attention functions: the VAE's has another name, and the precision asks for the type of the inputs."""
from __future__ import annotations

from stand_in_engine import code_of

code_of(
    "forge/backend/attention.py", globals(), ("attention_function_single_head_spatial", "attention_function_vae"),
    ("attn_precision: Any = torch.float32)", "attn_precision: Any, current_dtype: Any)"),
    ("return attn_precision", "return None"), ("mask: Any = None)", "mask: Any = None, **others: Any)"),
)

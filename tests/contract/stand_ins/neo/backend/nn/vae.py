"""Neo's VAE: Forge's, with another name for its attention function, and with decorated forwards."""
from __future__ import annotations

import torch  # noqa: F401
from stand_in_engine import code_of

code_of(
    "forge/backend/nn/vae.py", globals(), ("attention_function_single_head_spatial", "attention_function_vae"),
    ("    def forward(", "    @torch.inference_mode()\n    def forward("),
)

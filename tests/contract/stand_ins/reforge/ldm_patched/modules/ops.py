"""reForge's layers, which are ComfyUI's: each has a list of functions for its weight, and one for its bias."""
from __future__ import annotations

from stand_in_engine import code_of

code_of(
    "forge/backend/operations.py", globals(), ("ForgeOperations", "disable_weight_init"),
    ("Linear(torch.nn.Module)", "Linear(torch.nn.Linear)"),
    ("        def forward", "        weight_function = bias_function = ()\n\n        def forward"),
)

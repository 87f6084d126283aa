"""The adapter of Forge and Forge Neo. The one of reForge and Forge Classic, hosts.ldm_patched, builds on it."""
from __future__ import annotations

from ...families.leaf_reader import HOST_LAYERS
from .stored_weights import ALWAYS_CAST

# These compute the same as torch's layers. The host may cast or change their parameters at each call; weight_functions
# reads how.
HOST_LAYERS.take("backend", *(
    f"ForgeOperations.{layer}" for layer in ("Linear", "Conv2d", "GroupNorm", "LayerNorm", "RMSNorm")
))
# Layers of mixed-precision and GGUF files; stored_weights reads their weights.
HOST_LAYERS.take("backend", *ALWAYS_CAST)

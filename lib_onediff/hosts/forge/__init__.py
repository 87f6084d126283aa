"""The adapter of Forge and Forge Neo. The adapter of reForge and Forge Classic, hosts.ldm_patched, is derived from
it."""
from __future__ import annotations

from ...families.leaf_reader import HOST_LAYERS
from .stored_weights import ALWAYS_CAST

# These layers compute the same as torch's. The host may cast or change their parameters at each call:
# weight_functions.py reads how.
HOST_LAYERS.take("backend", *(
    f"ForgeOperations.{layer}" for layer in ("Linear", "Conv2d", "GroupNorm", "LayerNorm", "RMSNorm")
))
# Layers of mixed-precision and GGUF files. stored_weights.py reads their weights.
HOST_LAYERS.take("backend", *ALWAYS_CAST)

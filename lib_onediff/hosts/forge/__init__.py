"""Hosts whose UNet a model patcher holds: Forge and Forge Neo; hosts.ldm_patched builds on it."""
from __future__ import annotations

from ...families.leaf_reader import HOST_LAYERS
from .stored_weights import ALWAYS_CAST

# They compute what torch's layers do with parameters that the host may cast or change at each call, which
# weight_functions reads.
HOST_LAYERS.take("backend", *(
    f"ForgeOperations.{layer}" for layer in ("Linear", "Conv2d", "GroupNorm", "LayerNorm", "RMSNorm")
))
# Layers of mixed-precision and GGUF files: stored_weights reads what is in them.
HOST_LAYERS.take("backend", *ALWAYS_CAST)

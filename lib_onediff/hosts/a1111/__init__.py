"""AUTOMATIC1111's WebUI."""
from __future__ import annotations

from ...families.leaf_reader import HOST_LAYERS

# Group norms that compute in float32 and round the result to the dtype of their input.
HOST_LAYERS.take("ldm", "GroupNorm32")
HOST_LAYERS.take("sgm", "GroupNorm32")

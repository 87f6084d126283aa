"""The names of the backends."""
from __future__ import annotations

NATIVE, CUDAGRAPH, EAGER, ONEFLOW = "native", "cudagraph", "eager", "oneflow"

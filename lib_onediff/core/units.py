"""Units of memory, in bytes."""
from __future__ import annotations

KIBIBYTE = 2**10
MEBIBYTE = 2**20
GIBIBYTE = 2**30

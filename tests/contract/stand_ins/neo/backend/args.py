"""Global state that Neo's networks read besides their arguments."""
from __future__ import annotations

from typing import Any


class dynamic_args:
    ref_latents: list[Any] = []

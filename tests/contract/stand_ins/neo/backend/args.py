"""What Neo's networks look for beside their arguments."""
from __future__ import annotations

from typing import Any


class dynamic_args:
    ref_latents: list[Any] = []

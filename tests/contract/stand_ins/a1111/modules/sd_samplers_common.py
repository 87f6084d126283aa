"""A1111's function that decodes the latent of a sampling."""
from __future__ import annotations

from typing import Any


def decode_first_stage(model: Any, x: Any) -> Any:
    return model.decode_first_stage(x)

"""Which model is loaded. Unlike shared.sd_model in A1111, reading model_data.sd_model never loads one."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import script_callbacks, shared


@dataclass
class SdModelData:
    """The loaded model, or None."""

    sd_model: Any = None


model_data = SdModelData()


def use_model(sd_model: Any) -> None:
    """Make sd_model the loaded model and tell the scripts."""
    model_data.sd_model = shared.sd_model = sd_model
    script_callbacks.call_all("model_loaded", sd_model)

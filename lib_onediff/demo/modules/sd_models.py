"""The loaded model. Reading model_data.sd_model never loads one, in contrast to shared.sd_model in A1111."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from . import script_callbacks, shared

model_data: Any = SimpleNamespace(sd_model=None)


def use_model(sd_model: Any) -> None:
    """Make this the loaded model (a LoadedModel), and call the scripts' callbacks for a loaded model."""
    model_data.sd_model = shared.sd_model = sd_model
    script_callbacks.call_all("model_loaded", sd_model)

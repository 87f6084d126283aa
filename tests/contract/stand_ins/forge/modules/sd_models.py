"""Which checkpoint is loaded, and loading the chosen one."""
from __future__ import annotations

from typing import Any


class SdModelData:
    sd_model: Any = None


model_data = SdModelData()


def forge_model_reload() -> tuple[Any, bool]:
    return model_data.sd_model, False

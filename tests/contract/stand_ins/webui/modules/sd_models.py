"""The loaded checkpoint, and Forge's function that loads the selected checkpoint, which is always the loaded one
here."""
from __future__ import annotations

from typing import Any


class SdModelData:
    def __init__(self) -> None:
        self.sd_model: Any = None

    def get_sd_model(self) -> Any:
        return self.sd_model


model_data = SdModelData()


def forge_model_reload() -> tuple[Any, bool]:
    return model_data.sd_model, False

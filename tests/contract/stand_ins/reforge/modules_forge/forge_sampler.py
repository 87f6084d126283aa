"""Before and after a sampling."""
from __future__ import annotations

from typing import Any

from ldm_patched.modules import model_management


def sampling_prepare(unet: Any, x: Any) -> None:
    model_management.load_models_gpu([unet])


def sampling_cleanup(unet: Any) -> None:
    pass

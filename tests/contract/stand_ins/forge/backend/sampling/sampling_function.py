"""Before and after a sampling."""
from __future__ import annotations

from typing import Any

from backend import memory_management


def sampling_prepare(unet: Any, x: Any) -> None:
    memory_management.load_models_gpu([unet])


def sampling_cleanup(unet: Any) -> None:
    pass

"""Forge's function that merges LoRAs into a weight."""
from __future__ import annotations

from typing import Any

import torch
from stand_in_engine import merged
from torch import Tensor


def merge_lora_to_weight(
    patches: Any, weight: Tensor, key: str = "", computation_dtype: torch.dtype = torch.float32
) -> Tensor:
    return merged(weight.to(computation_dtype), patches).to(weight.dtype)

"""The part of modules.shared that every WebUI has."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

state = SimpleNamespace(interrupted=False, skipped=False, stopping_generation=False)
opts = SimpleNamespace(
    s_churn=0.0, upcast_attn=False, batch_cond_uncond=True, pad_cond_uncond=False, pad_cond_uncond_v0=False,
    lora_functional=False, data={},
)
cmd_opts = SimpleNamespace(lowvram=False)
loaded_hypernetworks: list[Any] = []
sd_model: Any = None

"""Forge Classic's UNet, ComfyUI's of early 2024: its forward computes the network itself and calls no _forward."""
from __future__ import annotations

from stand_in_engine import code_of

code_of("reforge/ldm_patched/ldm/modules/diffusionmodules/openaimodel.py", globals(), ("def _forward", "def forward"))

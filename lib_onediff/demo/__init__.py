"""A small WebUI over a diffusers pipeline: how a newcomer sees the product. It loads the script that A1111 loads."""
from __future__ import annotations

from pathlib import Path

# The model that ships; its README says how it was trained.
SHIPPED = Path(__file__).with_name("emoji-sd")

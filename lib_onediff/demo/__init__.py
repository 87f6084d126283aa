"""A small WebUI-compatible host over a diffusers pipeline: how a newcomer sees the product, and what CI drives.

Run it with `python -m lib_onediff.demo`. It loads the same scripts/onediff.py as A1111 and Forge do.
"""
from __future__ import annotations

from pathlib import Path

# The model that ships; its README says how it was trained.
SHIPPED = Path(__file__).with_name("emoji-sd")

"""The WebUI's data folder."""
from __future__ import annotations

data_path = "stand-in data"

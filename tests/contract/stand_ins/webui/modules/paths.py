"""The folder with the WebUI's data."""
from __future__ import annotations

data_path = "stand-in data"

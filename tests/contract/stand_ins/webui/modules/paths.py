"""Where the host keeps its data."""
from __future__ import annotations

data_path = "stand-in data"

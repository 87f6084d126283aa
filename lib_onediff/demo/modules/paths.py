"""The folders of OneDiff's checkout and of the user's data."""
from __future__ import annotations

from pathlib import Path

script_path = str(Path(__file__).resolve().parents[3])
data_path = str(Path(script_path, "outputs"))

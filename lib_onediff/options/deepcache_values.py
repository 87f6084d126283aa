"""What a user may choose of DeepCache."""
from __future__ import annotations

EARLY, UNIFORM = SCHEDULES = ("early", "uniform")
FORECAST, REUSED = FEATURES = ("forecast", "reused")
AS_FIRST, OFF = HIRES = ("as the first pass", "off")
MOST_INTERVAL, MOST_DEPTH = 20, 11

"""Measures how fast and how exact OneDiff is beside the host: `python -m lib_onediff.bench --help`."""

"""Measures OneDiff's speed and exactness against the host: `python -m lib_onediff.bench --help`."""

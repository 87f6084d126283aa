"""Data that outlives the process.

store: rows in one SQLite file of the cache folder. history: what was used, checked, measured and pinned.
"""

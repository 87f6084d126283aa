"""Data that outlives the process.

store.py: SQL statements for one SQLite file in the cache folder. history.py: what is stored there: which shapes were
used, results of checks and measurements, and pins.
"""

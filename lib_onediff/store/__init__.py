"""Data that outlives the process.

store: rows in one SQLite file of the cache folder. history: shapes that were used, and results of checks, measurements
and pins.
"""

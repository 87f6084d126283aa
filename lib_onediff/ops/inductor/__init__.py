"""Operators whose element-wise regions torch's Inductor compiles.

regions: which lines of the forward are compiled together. traced: a region as a graph. artifact: compiled code as a
file, with the guard on its sizes (size_guard). compiled: code that was read back. operators: the set that uses them.
"""

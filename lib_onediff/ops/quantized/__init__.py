"""Linear layers in float8.

scaled_mm: the matrix product. kernels: what quantizes tokens. gains: for which layers it is faster, measured on this
GPU. operators: the set that uses them.
"""

"""The kernels themselves, in Triton: the only files that import it."""

"""The launch code of our kernels, one file for each group of kernels, and the operators of the native backend."""

"""The kernels, in Triton. Only these files import Triton."""

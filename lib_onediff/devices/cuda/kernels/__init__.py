"""Our Triton kernels, a file for each family, and the operators that launch them."""

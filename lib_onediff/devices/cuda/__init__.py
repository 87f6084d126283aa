"""The backend for NVIDIA GPUs: our own kernels, CUDA graphs, and 8-bit products."""

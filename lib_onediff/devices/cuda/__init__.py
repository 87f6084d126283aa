"""NVIDIA GPUs: our kernels, graphs, eight bits."""

"""The CUDA graphs of all networks, and the GPU memory that they share."""

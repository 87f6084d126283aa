"""The CUDA graphs of all networks, and the memory that they share."""

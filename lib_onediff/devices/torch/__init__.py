"""PyTorch's operators: the reference."""

"""Linear layers and convolutions in eight bits. choice: which products gain. float8: float8 products."""

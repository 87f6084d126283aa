"""Linear layers and convolutions in eight bits."""

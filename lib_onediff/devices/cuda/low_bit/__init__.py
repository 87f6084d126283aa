"""Linear layers and convolutions in eight bits. choice: which products gain time. float8: products in float8.
timed_forwards: what is measured for the choice."""

"""Step policies: which part of a network each sampling step computes. Each is one file; registry.py lists them."""

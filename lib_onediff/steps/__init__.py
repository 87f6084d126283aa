"""Step policies: what of a network each sampling step computes. Each is one file; the registry lists them."""

"""How operators are computed, and how their result is run."""

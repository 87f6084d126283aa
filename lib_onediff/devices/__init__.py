"""The backends: implementations of the operators, and the ways to run a forward made of them."""

"""Which weights hold now: whether anything has changed under us."""

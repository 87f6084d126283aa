"""How a bound forward is run for one shape."""

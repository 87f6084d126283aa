"""A small transformer as a family, as "Add a transformer" in .readme/developing.md adds it."""

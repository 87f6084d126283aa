"""Z-Image: a transformer over the tokens of prompt and image together (single stream)."""

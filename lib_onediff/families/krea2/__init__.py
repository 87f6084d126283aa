"""Krea 2: a transformer over the tokens of prompt and image together (single stream)."""

"""Krea 2: one stream of the prompt's and the image's tokens."""

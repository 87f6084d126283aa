"""Z-Image: a transformer of one stream, the patches of a latent with the tokens of its prompt."""

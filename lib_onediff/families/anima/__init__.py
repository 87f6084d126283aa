"""Anima: Cosmos-Predict2's transformer over the patches of a latent, with cross attention to the prompt."""

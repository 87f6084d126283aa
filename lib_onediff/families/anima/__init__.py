"""Anima, the layout of Cosmos-Predict2: a transformer over patches of a latent, without convolutions."""

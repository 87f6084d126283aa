"""The VAE's network: layout, readers and forward, as in model/."""

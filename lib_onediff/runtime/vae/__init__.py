"""The VAE's route: route takes a call, fallback serves it, checks and overflow say when the host must."""

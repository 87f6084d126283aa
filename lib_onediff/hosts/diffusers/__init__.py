"""The adapter of diffusers' pipelines: their networks, VAEs and schedulers, and loading models from folders."""

"""diffusers' pipelines: UNet, VAE, and the steps of their schedulers."""

"""Side-by-side measurements of the host's UNet and VAE and ours: python -m lib_onediff.bench --help."""

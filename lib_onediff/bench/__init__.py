"""Side-by-side measurements of the host's UNet and ours: python -m lib_onediff.bench --help."""

"""The backends that run PyTorch's own operators. They are the reference: they serve every call on every device."""

"""The backends that run PyTorch's own operators, and these operators. The backend eager is the reference: it serves
every call on every device."""

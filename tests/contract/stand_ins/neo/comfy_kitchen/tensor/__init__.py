"""Its tensors of few bits."""

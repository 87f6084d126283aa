"""Networks: how each is read, and its forward as pure functions of tensors."""

"""Forge's release."""
version = "2.0.1v1.10.1"

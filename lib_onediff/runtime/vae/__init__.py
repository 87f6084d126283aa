"""Decodes and encodes: route takes a host's call, decode serves it."""

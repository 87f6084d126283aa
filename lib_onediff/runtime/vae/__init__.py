"""Decodes and encodes: route takes a host's call, bound knows its decoder, decode serves it in a type of precision."""

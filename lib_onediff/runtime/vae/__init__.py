"""Decodes and encodes of VAEs. route: serves a host's call. decode: runs our forward for the call. wider_type: chooses
the dtype of our forward."""

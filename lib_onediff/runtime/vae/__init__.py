"""Decodes and encodes of VAEs. route: a host's call. decode: our forward for it. wider_type: chooses its dtype."""

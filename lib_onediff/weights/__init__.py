"""Binds a host's weights for our forwards, and notices when the host or an extension changes them."""

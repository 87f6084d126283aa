"""Who serves this call, is it right, how long did it take, and why was it not faster?

managed_unets: the UNets in our care. accelerator: who serves a call of theirs. fallback: from the whole UNet as a graph
down to the host's forward. patched_route: where functions of other extensions run within it. verify: the first use of a
combination is checked against the host. call_stats: what happened. runtime: the one object, with what users ask of the
cache. vae/: the same for decoders and encoders. Imports engines/ and everything below.
"""

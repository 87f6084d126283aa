"""Who serves this call, is it right, how long did it take, and why was it not faster?

runtime: the one object, and the way of a call. stepping: the step policies around it. card_route: one card, from the
whole network as a graph down to plain launches; two_gpus: two. network: what is kept for one network. plan: how calls
like earlier ones are replayed. verify: a first use is checked against the host. graphs/: the memory of all graphs.
vae/: decoders and encoders. cache: what users ask.
"""

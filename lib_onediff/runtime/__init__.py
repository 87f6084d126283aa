"""Serves each call of a network: chooses who computes it, checks new shapes, times calls, and records the reasons.

runtime: the one Runtime object, and the route of a call. stepping: the step policies around a call. card_route: calls
on one GPU, from the whole network as a graph down to single launches. two_gpus: calls on two GPUs. network: everything
kept for one network. plan: how calls like earlier ones are replayed. verify: the first use of a shape is compared with
the host. call_stats: counts and times of calls, by image. generations: the generations in progress, which calls belong
to. graphs/: the memory of all graphs. vae/: decodes and encodes. cache: what pages and the API show and change.
"""

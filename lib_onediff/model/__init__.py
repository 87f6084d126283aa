"""What is the network? Pure functions of tensors: no host, no device, no engine.

layout describes a UNet, read_* find it in a host's module, weights bind it without copies, forward computes it with any
set of operators (see operators). deepcache/ cuts it in two, vae/ does the same for the VAE. Imports no other room.
"""

"""Stable Diffusion's UNets."""

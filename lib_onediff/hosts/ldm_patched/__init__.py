"""Hosts that carry ComfyUI's code as ldm_patched: reForge and Forge Classic.

adapter: Forge's, with other traits.
"""

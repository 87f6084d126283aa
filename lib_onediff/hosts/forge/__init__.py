"""Hosts whose UNet a model patcher holds: Forge and Forge Neo. hosts.ldm_patched builds on it.

adapter: the hook and the moments of a generation. traits: what differs between these hosts, and what we need of each.
call: a call of the host's UNet as a UNetCall. checks: what speaks against serving it. warm: calls outside a generation.
patches, weight_functions: what extensions and LoRAs put on the UNet.
"""

"""Hosts whose UNet a model patcher holds: Forge and Forge Neo; hosts.ldm_patched builds on it."""

"""Types that all packages share: refusals, samplings, and the protocols of families, devices, policies and hosts."""

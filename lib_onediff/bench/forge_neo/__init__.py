"""Forge Neo's own backend, from a checkout and without its page: as it comes, with what it offers to be faster, and
with ours."""

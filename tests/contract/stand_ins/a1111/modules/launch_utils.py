"""The launcher, which has the WebUI's version."""
from __future__ import annotations


def git_tag() -> str:
    return "v1.10.1"

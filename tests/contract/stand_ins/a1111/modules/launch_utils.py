"""What started the WebUI."""
from __future__ import annotations


def git_tag() -> str:
    return "v1.10.1"

"""A1111's launcher: git_tag() returns the WebUI's release."""
from __future__ import annotations


def git_tag() -> str:
    return "v1.10.1"

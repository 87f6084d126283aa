"""Why the same seed gives another image on another machine: everything that pixels depend on, as text."""
from __future__ import annotations

from .facts import machine_facts, onediff_facts
from .report import Facts, differences, parse, report

__all__ = ["Facts", "differences", "machine_facts", "onediff_facts", "parse", "report"]

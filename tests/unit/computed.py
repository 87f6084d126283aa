"""The output of a call, by the family that has read its layout."""
from __future__ import annotations

from lib_onediff.families.registry import FAMILIES

compute = FAMILIES.output

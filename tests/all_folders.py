"""Adds the folders with the tests' helpers to sys.path, for programs that are started by hand instead of by pytest."""
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
for folder in (TESTS.parent, TESTS, TESTS / "unit", TESTS / "contract"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

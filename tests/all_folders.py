"""Puts the folders of tests whose helpers others import on the path, for programs that are started by hand instead of
by pytest."""
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
for folder in (TESTS.parent, TESTS, TESTS / "unit", TESTS / "contract"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

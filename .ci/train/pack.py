"""Write emoji.json.xz from the three unpacked npm packages: pack.py NOTO FLUENT NAMES OUT."""
from __future__ import annotations

import sys
from pathlib import Path

from sources import read_packages, write_catalogue

noto, fluent, names, out = map(Path, sys.argv[1:5])
catalogue = read_packages(noto, fluent, names)
write_catalogue(catalogue, out)
print(len(catalogue), "emoji,", out.stat().st_size, "bytes")

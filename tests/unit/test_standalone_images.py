"""Image files in the standalone host: which are read."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("PIL")

ROOT = Path(__file__).resolve().parents[2]


def test_pillow_reads_no_other_formats_for_anybody() -> None:
    """In a process of its own, because it holds for all of it."""
    script = """
import io
from PIL import Image
from lib_onediff.demo.offline import limit_pillow
limit_pillow()
for format in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "ICO", "TGA"):
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, format)
    file.seek(0)
    try:
        print(Image.open(file).format)
    except Image.UnidentifiedImageError:
        pass
file = io.BytesIO()
Image.new("1", (6000, 6000)).save(file, "PNG")
try:
    Image.open(file)
except Image.DecompressionBombError:
    print("too many pixels")
"""
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.split() == ["PNG", "JPEG", "WEBP", "too", "many", "pixels"], found.stderr
    assert not found.stderr

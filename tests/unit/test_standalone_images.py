"""Image files in the standalone host: what is written into them, and which are read."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("PIL")

from lib_onediff.demo import images
from lib_onediff.demo.refusal import Refusal

ROOT = Path(__file__).resolve().parents[2]

def test_png_carries_its_infotext() -> None:
    import io

    from PIL import Image

    image = Image.new("RGB", (3, 2), "red")
    image.info["parameters"] = "späte Füchse\nSteps: 3"
    file = images.png_bytes(image)
    assert file == images.png_bytes(image)
    assert Image.open(io.BytesIO(file)).info["parameters"] == image.info["parameters"]
    assert images.from_base64(images.to_base64(image)).size == (3, 2)


def image_file(format: str) -> str:
    import base64
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, format)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_usual_formats_are_read(format: str) -> None:
    assert images.from_base64(image_file(format)).size == (64, 64)


@pytest.mark.parametrize("format", ["BMP", "GIF", "TIFF", "PPM", "ICO", "PCX", "TGA", "JPEG2000", "EPS"])
def test_other_formats_are_not_read(format: str) -> None:
    with pytest.raises(Refusal, match="PNG, JPEG or WebP"):
        images.from_base64(image_file(format))


def test_pillow_reads_no_other_formats_for_anybody() -> None:
    """In a process of its own, because it holds for all of it."""
    script = """
import io
from PIL import Image
from lib_onediff.demo.images import read_no_other_formats
read_no_other_formats()
for format in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "ICO", "TGA"):
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, format)
    file.seek(0)
    try:
        print(Image.open(file).format)
    except Image.UnidentifiedImageError:
        pass
"""
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.split() == ["PNG", "JPEG", "WEBP"], found.stderr

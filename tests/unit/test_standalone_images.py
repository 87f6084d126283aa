"""Image files in the standalone host: what is written into them, and which are read."""
from __future__ import annotations

import gc
import subprocess
import sys
import weakref
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


def png_that_promises(width: int, height: int) -> str:
    """A PNG file of some bytes, whose header names a size."""
    import base64
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return base64.b64encode(file).decode()


@pytest.mark.parametrize("side", [6000, 13300, 30000])
def test_images_of_more_pixels_than_anybody_needs_are_refused_by_their_header(side: int) -> None:
    with pytest.raises(Refusal, match="more than 33554432 pixels"):
        images.from_base64(png_that_promises(side, side))


def test_large_files_are_not_read() -> None:
    with pytest.raises(Refusal, match="more than 32 MiB"):
        images.from_base64("A" * (images.LARGEST_FILE * 4 // 3 + 4))


def test_pixels_are_read_one_image_after_the_other_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from lib_onediff.demo.modules.processing import StableDiffusionProcessingImg2Img
    from lib_onediff.demo.rest_models import Img2ImgRequest

    held: list[int] = []
    original = images.decoded

    def counting(image: object) -> object:
        gc.collect()
        held.append(sum(other() is not None and other() is not image for other in read))
        read.append(weakref.ref(image))
        return original(image)

    read: list[weakref.ref] = []
    monkeypatch.setattr(images, "decoded", counting)
    body = Img2ImgRequest(init_images=[image_file("PNG")] * 3, batch_size=3, width=64, height=64)
    p = StableDiffusionProcessingImg2Img(**body.arguments())
    assert not read
    p.init([], [], [])
    assert held == [0, 0, 0] and len(p.init_images) == 3
    with pytest.raises(Refusal, match="more init images"):
        Img2ImgRequest(init_images=["not even opened"] * 12).arguments()


def test_a_file_that_is_cut_off_is_refused_when_it_is_read() -> None:
    with pytest.raises(Refusal, match="cannot be read"):
        images.decoded(images.from_base64(png_that_promises(64, 64)))


@pytest.mark.parametrize("format", ["BMP", "GIF", "TIFF", "PPM", "ICO", "PCX", "TGA", "JPEG2000", "EPS"])
def test_other_formats_are_not_read(format: str) -> None:
    with pytest.raises(Refusal, match="PNG, JPEG or WebP"):
        images.from_base64(image_file(format))


def test_pillow_reads_no_other_formats_for_anybody() -> None:
    """In a process of its own, because it holds for all of it."""
    script = """
import io
from PIL import Image
from lib_onediff.demo.images import limit_pillow
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

"""Images over the REST API: base64 of PNG files out, of PNG, JPEG and WebP in."""
from __future__ import annotations

import base64
import binascii
import io

from PIL import Image, PngImagePlugin, UnidentifiedImageError

from lib_onediff.demo.errors import Refusal
from lib_onediff.demo.offline import FORMATS, MOST_PIXELS

UNREADABLE = (UnidentifiedImageError, OSError, SyntaxError, ValueError, EOFError)
TOO_MANY_PIXELS = f"The image that was sent has more than {MOST_PIXELS} pixels; send a smaller one."


def to_base64(image: Image.Image) -> str:
    """base64 of a PNG file with the image's infotext; the same image gives the same text."""
    texts = PngImagePlugin.PngInfo()
    texts.add_text("parameters", image.info["parameters"])
    file = io.BytesIO()
    image.save(file, format="PNG", pnginfo=texts)
    return base64.b64encode(file.getvalue()).decode("ascii")


def from_base64(text: str) -> Image.Image:
    """The image in a base64 text, with or without a data: header. Raises Refusal for anything else."""
    try:
        data = base64.b64decode("".join(text.rpartition(",")[2].split()), validate=True)
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.width * image.height > MOST_PIXELS:
            raise Refusal(TOO_MANY_PIXELS)
        image.load()
    except Image.DecompressionBombError as error:
        raise Refusal(TOO_MANY_PIXELS) from error
    except (binascii.Error, *UNREADABLE) as error:
        raise Refusal("The image that was sent is no base64 of a PNG, JPEG or WebP file.") from error
    return image

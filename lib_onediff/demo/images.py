"""Images in and out: PNG files with infotext, images sent as base64, and sizes."""
from __future__ import annotations

import base64
import binascii
import io
import warnings
from typing import Any

from PIL import Image, ImageFilter, ImageOps, PngImagePlugin, UnidentifiedImageError

from .refusal import Refusal

INFOTEXT_CHUNK = "parameters"
FORMATS = ("PNG", "JPEG", "WEBP")
NAMES_OF_FORMATS = "PNG, JPEG or WebP"
# Of a file, and of the image that its header promises: a few KiB may hold gigabytes.
LARGEST_FILE = 32 << 20
MOST_PIXELS = 32 << 20
UNREADABLE = (UnidentifiedImageError, OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)


def png_bytes(image: Image.Image) -> bytes:
    """A PNG file of image with its infotext; the same image gives the same bytes."""
    texts = PngImagePlugin.PngInfo()
    if image.info.get(INFOTEXT_CHUNK):
        texts.add_text(INFOTEXT_CHUNK, image.info[INFOTEXT_CHUNK])
    file = io.BytesIO()
    image.save(file, format="PNG", pnginfo=texts)
    return file.getvalue()


def to_base64(image: Image.Image) -> str:
    """image as base64 of a PNG file."""
    return base64.b64encode(png_bytes(image)).decode("ascii")


def from_base64(text: str) -> Image.Image:
    """The image in a base64 text, with or without a data: header. Its pixels are read when they are asked for: see
    decoded. Raises Refusal for anything else, and for what is too large."""
    if text.startswith(("http://", "https://")):
        raise Refusal("Images must be sent as base64; this host fetches no addresses.")
    if text.startswith("data:image/"):
        text = text.partition(",")[2]
    if len(text) > LARGEST_FILE * 4 // 3:
        raise Refusal(f"The image that was sent is a file of more than {LARGEST_FILE >> 20} MiB.")
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refusal("The image is not valid base64.") from error
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise too_many_pixels() from error
    except UNREADABLE as error:
        raise unreadable() from error
    if image.width * image.height > MOST_PIXELS:
        raise too_many_pixels()
    return image


def decoded(image: Image.Image) -> Image.Image:
    """The image with its pixels. Raises Refusal where the file does not hold them."""
    try:
        image.load()
    except UNREADABLE as error:
        raise unreadable() from error
    return image


def unreadable() -> Refusal:
    return Refusal(f"The image that was sent cannot be read as {NAMES_OF_FORMATS}.")


def too_many_pixels() -> Refusal:
    return Refusal(f"The image that was sent has more than {MOST_PIXELS} pixels; send a smaller one.")


def limit_pillow() -> None:
    """Have Pillow read FORMATS alone in this process, and nothing larger than MOST_PIXELS, also where gradio opens what
    was uploaded.

    It reads dozens, some of them by code that nobody looks after, and tells them by their first bytes.
    """
    Image.init()
    Image.ID[:] = FORMATS
    for name in Image.OPEN.keys() - set(FORMATS):
        del Image.OPEN[name]
    # From here on it warns, and at the double it raises.
    Image.MAX_IMAGE_PIXELS = MOST_PIXELS // 2
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def fit_image(image: Image.Image, width: int, height: int, resize_mode: int) -> Image.Image:
    """An init image in the generation's size: 0 stretches it, 1 cuts off what does not fit."""
    image = flatten(decoded(image))
    if resize_mode == 1:
        return ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.LANCZOS)


def fit_mask(p: Any) -> Image.Image:
    """The mask in the generation's size, blurred as asked; white is repainted."""
    mask = decoded(p.mask).convert("L")
    mask = fit_image(mask, p.width, p.height, p.resize_mode).convert("L")
    if p.inpainting_mask_invert:
        mask = ImageOps.invert(mask)
    return mask.filter(ImageFilter.GaussianBlur(p.mask_blur)) if p.mask_blur else mask


def flatten(image: Image.Image) -> Image.Image:
    """An RGB image; transparent parts become white."""
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image.convert("RGB")
    opaque = Image.new("RGBA", image.size, "white")
    opaque.alpha_composite(image.convert("RGBA"))
    return opaque.convert("RGB")

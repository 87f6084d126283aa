"""Images in and out: PNG files with infotext, images sent as base64, and sizes."""
from __future__ import annotations

import base64
import binascii
import io
from typing import Any

from PIL import Image, ImageFilter, ImageOps, PngImagePlugin, UnidentifiedImageError

from .refusal import Refusal

INFOTEXT_CHUNK = "parameters"
FORMATS = ("PNG", "JPEG", "WEBP")
NAMES_OF_FORMATS = "PNG, JPEG or WebP"


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
    """The image in a base64 text, with or without a data: header. Raises Refusal for anything else."""
    if text.startswith(("http://", "https://")):
        raise Refusal("Images must be sent as base64; this host fetches no addresses.")
    if text.startswith("data:image/"):
        text = text.partition(",")[2]
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refusal("The image is not valid base64.") from error
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        image.load()
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise Refusal(f"The image that was sent cannot be read as {NAMES_OF_FORMATS}.") from error
    return image


def read_no_other_formats() -> None:
    """Have Pillow read FORMATS alone in this process, also where gradio opens what was uploaded.

    It reads dozens, some of them by code that nobody looks after, and tells them by their first bytes.
    """
    Image.init()
    Image.ID[:] = FORMATS
    for name in Image.OPEN.keys() - set(FORMATS):
        del Image.OPEN[name]


def fit_image(image: Image.Image, width: int, height: int, resize_mode: int) -> Image.Image:
    """An init image in the generation's size: 0 stretches it, 1 cuts off what does not fit."""
    image = flatten(image)
    if resize_mode == 1:
        return ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.LANCZOS)


def fit_mask(p: Any) -> Image.Image:
    """The mask in the generation's size, blurred as asked; white is repainted."""
    mask = p.mask.convert("L")
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

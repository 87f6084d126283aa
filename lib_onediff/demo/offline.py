"""What gradio would do and this host does not: ask other hosts, fetch what a request names, open any file as an image.
"""
from __future__ import annotations

import re
import warnings
from typing import NoReturn

import gradio.routes
import httpx
import jinja2
from gradio import processing_utils
from PIL import Image

FOREIGN_ELEMENTS = re.compile(
    r"""<link\s[^>]*rel="preconnect"[^>]*/?>|<script\s[^>]*src="https?://[^"]*"[^>]*>\s*</script>|<meta\s[^>]*content="https?://[^"]*"[^>]*/?>"""
)
FORMATS = ("PNG", "JPEG", "WEBP")
# Of the image that a file's header promises: a few KiB may hold gigabytes.
MOST_PIXELS = 32 << 20


class OwnResourcesOnly(jinja2.FileSystemLoader):
    """gradio's page without its references to other hosts."""

    def get_source(self, environment: jinja2.Environment, template: str) -> tuple:
        source, *more = super().get_source(environment, template)
        return FOREIGN_ELEMENTS.sub("", source), *more


def refuse(request: httpx.Request) -> NoReturn:
    raise httpx.ConnectError("This host fetches no addresses.", request=request)


async def fetch_none(url: str) -> NoReturn:
    refuse(httpx.Request("GET", url))


def fetch_nothing() -> None:
    """Keep gradio in this process from leading a browser to other hosts, and from fetching the addresses that a request
    gives for files."""
    gradio.routes.templates.env.loader = OwnResourcesOnly(gradio.routes.STATIC_TEMPLATE_LIB)
    processing_utils.sync_client = httpx.Client(transport=httpx.MockTransport(refuse))
    processing_utils.async_ssrf_protected_get = fetch_none


def limit_pillow() -> None:
    """Have Pillow read FORMATS alone in this process, and nothing larger than MOST_PIXELS.

    It reads dozens, some of them by code that nobody looks after.
    """
    Image.init()
    Image.ID[:] = FORMATS
    for name in Image.OPEN.keys() - set(FORMATS):
        del Image.OPEN[name]
    # From here on it warns, and at the double it raises.
    Image.MAX_IMAGE_PIXELS = MOST_PIXELS // 2
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

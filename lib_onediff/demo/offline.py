"""What gradio would do and this host does not: ask other hosts, and fetch what a request names."""
from __future__ import annotations

import re
from typing import NoReturn

import gradio.routes
import httpx
import jinja2
from gradio import processing_utils

FOREIGN_ELEMENTS = re.compile(
    r"""<link\s[^>]*rel="preconnect"[^>]*/?>|<script\s[^>]*src="https?://[^"]*"[^>]*>\s*</script>|<meta\s[^>]*content="https?://[^"]*"[^>]*/?>"""
)


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

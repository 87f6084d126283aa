"""Builds the demo's server from the model, scripts, options, page and API, and runs it with uvicorn. It makes no
requests to other servers."""
from __future__ import annotations

import argparse
import logging
import os
import re
import socket
from pathlib import Path
from typing import Any, NoReturn

import gradio as gr
import httpx
import jinja2
import uvicorn
from fastapi import Depends, FastAPI
from fastapi.responses import JSONResponse
from gradio import processing_utils, routes

from ..api.auth import login_check
from ..api.gate import Gate, Origins, host_name
from .connections import ACCEPTED_AT_ONCE, NOISY, Connection, FewLines, most_connections
from .logins import KnowsClient, Logins, accounts_in
from .models import LoadedModel
from .modules import paths, script_callbacks, scripts, sd_models, shared
from .page import appearance, build_page

# The Content-Security-Policy of the page.
PAGE_POLICY = (
    "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; frame-ancestors 'self'"
)
# The time for answers in progress when the server ends. Then connections are closed: pages keep theirs open without a
# limit.
SECONDS_FOR_ANSWERS = 1
# The elements in gradio's page template that refer to other servers.
FOREIGN_ELEMENTS = re.compile(
    r"""<link\s[^>]*rel="preconnect"[^>]*/?>|<script\s[^>]*src="https?://[^"]*"[^>]*>\s*</script>|<meta\s[^>]*content="https?://[^"]*"[^>]*/?>"""
)


class QuietServer(uvicorn.Server):
    """uvicorn's server without the log lines that it writes about each open page when it ends."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn when it ends: silence its log, then close all connections."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)
        await super().shutdown(sockets)


def make_app(arguments: argparse.Namespace, model: LoadedModel, only_this_machine: bool = False) -> FastAPI:
    """The demo as one ASGI app: page, API and login. Sets the folders, options and model in demo.modules, and loads the
    scripts. Call it once, inside of modules_importable() and after fetch_nothing().

    arguments: see command_line.make_parser. only_this_machine: whether only programs on this machine can connect, so
        that foreign host names are refused.
    """
    paths.data_path = str(Path(arguments.data_dir).expanduser().resolve())
    shared.config_filename = os.path.join(paths.data_path, "config.json")
    shared.opts.load(shared.config_filename)
    shared.cmd_opts = arguments
    scripts.load_scripts()
    sd_models.use_model(model)
    script_callbacks.call_all("ui_settings")
    page = build_page()
    app = FastAPI(title="OneDiff demo", docs_url=None, redoc_url=None, openapi_url=None)
    check_login = login_check(bool(arguments.gradio_auth))
    app.add_api_route(
        "/openapi.json", lambda: JSONResponse(app.openapi()), include_in_schema=False,
        dependencies=[Depends(check_login)],
    )
    # Routes of the API are added first, because the page takes every remaining path.
    script_callbacks.call_all("app_started", page, app)
    origins = own_origins(arguments, only_this_machine)
    app.add_middleware(Gate, origins=origins, identify=check_login, page_policy=PAGE_POLICY)
    app.add_middleware(KnowsClient)
    accounts = accounts_in(arguments.gradio_auth or "")
    check = Logins(accounts).check if accounts else None
    # api_open=False: requests that bypass the queue would use up the threads that interrupt and progress need.
    queued = page.queue(default_concurrency_limit=4, api_open=False)
    return gr.mount_gradio_app(app, queued, path="/", auth=check, footer_links=[], **appearance())


def own_origins(arguments: argparse.Namespace, only_this_machine: bool) -> Origins:
    """The host names under which browsers may open the demo, for the gate (api.gate). arguments, only_this_machine: see
    make_app. If other machines can connect and --allowed-hosts is not given, every name is allowed."""
    # If others can reach the demo, their names for it are only known if --allowed-hosts has them.
    strict = only_this_machine or bool(arguments.allowed_hosts)
    names = [arguments.host, *(arguments.allowed_hosts or "").split(",")]
    return Origins(strict_host=strict, names=set(map(host_name, names)) - {""})


def serve(app: FastAPI, listener: socket.socket) -> None:
    """Answer requests at the listener until Ctrl-C or SIGTERM, then call the scripts' callbacks for unloading. Raises
    KeyboardInterrupt: uvicorn raises the signal again, with the handlers of __main__.run()."""
    # ws="none": neither gradio nor the API uses web sockets.
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=SECONDS_FOR_ANSWERS, ws="none",
        http=type("Connection", (Connection,), {"most": most_connections()}), backlog=ACCEPTED_AT_ONCE,
    )
    few = FewLines()
    for name in NOISY:
        logging.getLogger(name).addFilter(few)
    try:
        QuietServer(config).run(sockets=[listener])
    finally:
        script_callbacks.call_all("script_unloaded")


# --- keeping gradio from contacting other servers ---------------------------------------------------------------------


class OwnResourcesOnly(jinja2.FileSystemLoader):
    """A jinja2 loader that removes references to other servers (fonts, scripts) from gradio's page template."""

    def get_source(self, environment: jinja2.Environment, template: str) -> tuple:
        """Called by jinja2: (the template's source without FOREIGN_ELEMENTS, its path, a function that returns whether
        the source is up to date)."""
        source, *more = super().get_source(environment, template)
        return FOREIGN_ELEMENTS.sub("", source), *more


def refuse(url: Any) -> NoReturn:
    """Raise httpx.ConnectError for any URL. fetch_nothing() replaces gradio's functions that send requests by this."""
    raise httpx.ConnectError("This server downloads nothing from addresses.")


def fetch_nothing() -> None:
    """Change gradio in this process so that its page has no references to other servers, and so that it never downloads
    a URL that a request gives in place of a file. Call it before make_app."""
    routes.templates.env.loader = OwnResourcesOnly(routes.STATIC_TEMPLATE_LIB)
    processing_utils.sync_client = httpx.Client(transport=httpx.MockTransport(refuse))
    processing_utils.async_ssrf_protected_get = refuse

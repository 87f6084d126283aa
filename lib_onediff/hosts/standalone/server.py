"""Putting the host together: model, scripts, options, page and API, served by uvicorn."""
from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path

import gradio as gr
import uvicorn
from fastapi import FastAPI

from ...api.auth import protection
from .docs import add_docs
from .listening import is_loopback, url_of
from .loaded_model import LoadedModel
from .modules import paths, script_callbacks, scripts, sd_models, shared
from .offline import OwnResourcesOnly
from .page import build_page
from .rest import make_router


class AnnouncingServer(uvicorn.Server):
    """Prints the address once requests are answered."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket, is_open: bool) -> None:
        super().__init__(config)
        self.listener, self.is_open = listener, is_open

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            if self.is_open and not is_loopback(self.listener):
                print("Everybody who can reach this machine can use this page: it asks for no password.", flush=True)
            print(f"OneDiff demo running on {url_of(self.listener)}", flush=True)


def make_app(arguments: argparse.Namespace, model: LoadedModel) -> FastAPI:
    """The whole host as one ASGI app. modules_importable() must be in force."""
    use_data_folder(arguments.data_dir)
    shared.cmd_opts = arguments
    scripts.load_scripts()
    sd_models.use_model(model)
    script_callbacks.ui_settings_callback()
    page = build_page()
    app = FastAPI(title="OneDiff demo", docs_url=None, redoc_url=None)
    app.include_router(make_router(), dependencies=protection(arguments))
    add_docs(app)
    # Before the page takes every remaining path.
    script_callbacks.app_started_callback(page, app)
    app.add_middleware(OwnResourcesOnly)
    accounts = [tuple(account.split(":", 1)) for account in (arguments.gradio_auth or "").split(",") if account]
    return gr.mount_gradio_app(app, page.queue(default_concurrency_limit=4), path="/", auth=accounts or None)


def use_data_folder(folder: str) -> None:
    """Keep settings and pictures in folder, and load the settings that are there."""
    paths.data_path = str(Path(folder).expanduser().resolve())
    shared.config_filename = os.path.join(paths.data_path, "config.json")
    shared.opts.load(shared.config_filename)


def serve(app: FastAPI, listener: socket.socket) -> None:
    """Answer requests until interrupted."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=3)
    try:
        AnnouncingServer(config, listener, not shared.cmd_opts.gradio_auth).run(sockets=[listener])
    finally:
        shared.state.interrupt()
        script_callbacks.script_unloaded_callback()

"""`python -m lib_onediff.demo` starts the demo, a small WebUI with OneDiff in it."""
from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import warnings
from typing import Any, NoReturn

from ..core.logs import one_line
from ..core.refusal import Refusal
from .command_line import is_loopback, listen, parse_arguments, url_of

STOPPING = (signal.SIGINT, signal.SIGTERM)


def stay_offline_and_quiet(cache: str) -> None:
    """Keep libraries from contacting other servers and from printing warnings and progress bars. To be called before
    torch, diffusers and gradio are imported, because they read environment variables then. cache: the folder for
    gradio's files."""
    os.environ.update(
        HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", TRANSFORMERS_OFFLINE="1", DIFFUSERS_VERBOSITY="error",
        TRANSFORMERS_VERBOSITY="error", GRADIO_ANALYTICS_ENABLED="False", GRADIO_TEMP_DIR=cache,
    )
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", module="torchsde")
    # Otherwise gradio reaches its own server through the machine's proxy.
    os.environ["NO_PROXY"] = ",".join(filter(None, [os.environ.get("NO_PROXY"), "localhost,127.0.0.1,::1"]))


def main(words: list[str] | None = None) -> int:
    """Run the demo until it is stopped. Returns the exit code: 0, or 1 after printing why it cannot run. Until the page
    is served, Ctrl-C and SIGTERM end the process at once, with exit code 0. words: the command line's arguments; None
    for the process's own."""
    arguments = parse_arguments(words)
    # Images and uploads lie here. mkdtemp makes the folder readable for this user alone.
    cache = tempfile.mkdtemp(prefix="onediff-page-")

    def end_at_once(*_: Any) -> NoReturn:
        # Before the server runs, there is nothing to save. An exception raised here could change on its way through an
        # import in progress.
        shutil.rmtree(cache, ignore_errors=True)
        os._exit(0)

    for number in STOPPING:
        signal.signal(number, end_at_once)
    try:
        with listen(arguments.host, arguments.port) as listener:
            run(arguments, listener, cache)
        return 0
    except Refusal as problem:
        print(one_line(str(problem)), file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def run(arguments: argparse.Namespace, listener: socket.socket, cache: str) -> None:
    """Load the model and serve the page. Returns after Ctrl-C or SIGTERM. Until the page is served, these signals go to
    the handlers that the process has already.

    Calls stay_offline_and_quiet() before it imports torch, diffusers and gradio. If other machines can reach the
    listener, calls require_account(). Replaces the handlers of SIGINT and SIGTERM and does not put them back, so it may
    be called only in the main thread.

    arguments: from parse_arguments; require_account() may set its gradio_auth. listener: the socket to serve at. cache:
    gradio's folder for images and uploads. Raises Refusal with a sentence if the model cannot be loaded.
    """
    stay_offline_and_quiet(cache)
    from .models import load_model

    print("Loading the model ...", flush=True)
    model = load_model(arguments.model)
    from .modules import modules_importable
    from .server import fetch_nothing, make_app, serve

    fetch_nothing()
    only_this_machine = is_loopback(listener)
    if not only_this_machine:
        require_account(arguments)
    with modules_importable():
        app = make_app(arguments, model, only_this_machine)
        for number in STOPPING:
            signal.signal(number, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            print(f"OneDiff demo running on {url_of(listener)}", flush=True)
            serve(app, listener)


def require_account(arguments: argparse.Namespace) -> None:
    """Make up an account, set arguments.gradio_auth to it ("name:password", as in --gradio-auth) and print it; do
    nothing if the user has given accounts. Called only if other machines can reach the demo."""
    if not arguments.gradio_auth:
        password = secrets.token_urlsafe(12)
        arguments.gradio_auth = f"onediff:{password}"
        print(f"Others can reach this address, so it asks for an account: name onediff, password {password}. "
              "--gradio-auth NAME:PASSWORD sets your own.", flush=True)


def leave(code: int) -> NoReturn:
    """Run the process's atexit functions, then end it with this exit code without waiting for its threads or for
    torch's shutdown, which takes seconds."""
    # One of the atexit functions writes what the history (store.history) has not written yet.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())

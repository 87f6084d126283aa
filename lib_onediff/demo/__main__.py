"""`python -m lib_onediff.demo`: the command line."""
from __future__ import annotations

import argparse
import atexit
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ..logs import one_line

NEEDED_PACKAGES = ("diffusers", "transformers", "gradio", "fastapi", "uvicorn", "PIL")
SECONDS_TO_END = 2.0
DEFAULT_DATA_DIR = Path(__file__).resolve().parents[2] / "outputs"


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lib_onediff.demo",
        description="A small WebUI around OneDiff: txt2img and img2img in the browser and over A1111's REST API.",
    )
    parser.add_argument(
        "--model", metavar="FILE_OR_FOLDER",
        help="a .safetensors or .ckpt checkpoint, or a folder in diffusers' layout, of Stable Diffusion 1.x, 2.x or "
        "XL; without it the small emoji-sd where it is installed, else random weights",
    )
    parser.add_argument("--random", action="store_true", help="without --model: a small model of random weights")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only); for "
                        "one that others can reach, an account is made up where none is given")
    parser.add_argument("--port", type=int, help="port to listen on (default: the first free one from 7860)")
    parser.add_argument("--data-dir", default=str(DEFAULT_DATA_DIR), help="where settings and images are kept")
    parser.add_argument(
        "--api-auth", type=accounts, metavar="USER:PASSWORD[,...]", help="who may use the API (default: everybody)"
    )
    parser.add_argument(
        "--gradio-auth", type=accounts, metavar="USER:PASSWORD[,...]",
        help="who may use the page, and without --api-auth the API (default: everybody)",
    )
    parser.add_argument(
        "--allowed-hosts", metavar="NAME[,...]",
        help="the names by which browsers reach the host, for example through a proxy (default: localhost and "
        "addresses; every name with a --host that others can reach)",
    )
    arguments = parser.parse_args(words)
    # What scripts look for in a WebUI's command line.
    arguments.api, arguments.nowebui, arguments.freeze_settings, arguments.gradio_auth_path = True, False, False, None
    return arguments


def accounts(text: str) -> str:
    """Accounts as the command line has them."""
    if not all(user and colon for user, colon, _ in (account.partition(":") for account in text.split(","))):
        raise argparse.ArgumentTypeError("give accounts as user:password,user:password")
    return text


def stay_offline_and_quiet(cache: str) -> None:
    """Set what libraries read from the environment when they are imported."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        DIFFUSERS_VERBOSITY="error",
        TRANSFORMERS_VERBOSITY="error",
        GRADIO_ANALYTICS_ENABLED="False",
        GRADIO_TEMP_DIR=cache,
    )
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", module="torchsde")
    # gradio reaches its own server through the machine's proxy otherwise.
    os.environ["NO_PROXY"] = ",".join(filter(None, [os.environ.get("NO_PROXY"), "localhost,127.0.0.1,::1"]))


def main(words: list[str] | None = None) -> int:
    """Run the host; the exit code is 1 after a sentence about what is wrong."""
    arguments = parse_arguments(words)
    stop = StopRequest()
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    with tempfile.TemporaryDirectory(prefix="onediff-page-") as cache:
        stay_offline_and_quiet(cache)
        from .listening import listen

        try:
            listener = listen(arguments.host, arguments.port)
            if isinstance(listener, str):
                print(one_line(listener), file=sys.stderr)
                return 1
            with listener:
                return run(arguments, listener, lambda: end_in_time(cache), stop)
        except BaseException:
            # An interrupt while pydantic is imported comes out of Rust as something else.
            if not stop.came:
                raise
            return 0


class StopRequest:
    """Handles the signals that ask us to end. Python drops an exception that is raised while an object is destroyed, so
    the request is remembered too."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt


def end_in_time(cache: str) -> None:
    """End the process before long, also where the server waits for a UNet call, which nothing can interrupt."""

    def end() -> None:
        shutil.rmtree(cache, ignore_errors=True)
        os._exit(0)

    timer = threading.Timer(SECONDS_TO_END, end)
    timer.daemon = True
    timer.start()


def run(
    arguments: argparse.Namespace, listener: socket.socket, on_stop: Callable[[], None], stop: StopRequest
) -> int:
    """Load the model and serve until interrupted, when on_stop is called; 1 after a sentence about what is wrong."""
    missing = [name for name in NEEDED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        print(f"The standalone host needs packages that are not installed: {', '.join(missing)}.", file=sys.stderr)
        return 1
    from .errors import ModelProblem
    from .models import load_model

    print("Loading the model ...", flush=True)
    try:
        model = load_model(arguments.model, arguments.random)
    except ModelProblem as problem:
        print(one_line(str(problem)), file=sys.stderr)
        return 1
    from .images import limit_pillow
    from .listening import is_loopback
    from .modules import modules_importable
    from .offline import fetch_nothing
    from .server import make_app, serve

    fetch_nothing()
    limit_pillow()
    only_this_machine = is_loopback(listener)
    if not only_this_machine:
        ask_for_an_account(arguments)
    with modules_importable():
        if stop.came:
            raise KeyboardInterrupt
        serve(make_app(arguments, model, only_this_machine), listener, on_stop)
    return 0


def ask_for_an_account(arguments: argparse.Namespace) -> None:
    """Where others can reach the host, nobody uses it without an account; one is made up where none is given."""
    if not arguments.gradio_auth and not arguments.api_auth:
        password = secrets.token_urlsafe(12)
        arguments.api_auth = f"onediff:{password}"
        print(f"Others can reach this address, so it asks for an account: name onediff, password {password}. "
              "--gradio-auth NAME:PASSWORD sets your own.", flush=True)
    arguments.gradio_auth = arguments.gradio_auth or arguments.api_auth
    arguments.api_auth = arguments.api_auth or arguments.gradio_auth


def leave(code: int) -> NoReturn:
    """End the process at once: threads may be busy for long, and to take torch apart takes seconds."""
    # Among them the store's, which writes what it has not yet written.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())

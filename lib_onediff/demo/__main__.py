"""`python -m lib_onediff.demo`: the command line."""
from __future__ import annotations

import argparse
import atexit
import contextlib
import ipaddress
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NoReturn

from ..core.logs import one_line, readable
from ..core.refusal import Refusal

DEFAULT_DATA_DIR = Path(__file__).resolve().parents[2] / "outputs"
FIRST_PORT = 7860
PORTS_TO_TRY = 100
STOPPING = (signal.SIGINT, signal.SIGTERM)


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="install.py --demo", allow_abbrev=False,
        description="A small WebUI around OneDiff: txt2img in the browser.",
    )
    parser.add_argument(
        "--model", metavar="FILE_OR_FOLDER",
        help="a .safetensors checkpoint, or a folder in diffusers' layout, of Stable Diffusion 1.x, 2.x or "
        "XL; or emoji-dit, a small transformer; without it the small emoji-sd",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only); for "
                        "one that others can reach, an account is made up where none is given")
    parser.add_argument("--port", type=int, help="port to listen on (default: the first free one from 7860)")
    parser.add_argument("--data-dir", default=str(DEFAULT_DATA_DIR), help="where settings and caches are kept")
    parser.add_argument("--gradio-auth", type=accounts, metavar="USER:PASSWORD[,...]",
                        help="who may use the page and the API (default: everybody)")
    parser.add_argument(
        "--allowed-hosts", metavar="NAME[,...]",
        help="the names by which browsers reach the host, for example through a proxy (default: localhost and "
        "addresses; every name with a --host that others can reach)",
    )
    arguments = parser.parse_args(words)
    # OneDiff's script asks for it, as in a WebUI's command line.
    arguments.api = True
    return arguments


def accounts(text: str) -> str:
    """Accounts as the command line has them."""
    if not all(user and colon for user, colon, _ in (account.partition(":") for account in text.split(","))):
        raise argparse.ArgumentTypeError("give accounts as user:password,user:password")
    return text


def stay_offline_and_quiet(cache: str) -> None:
    """Set what libraries read from the environment when they are imported. cache: gradio's folder."""
    os.environ.update(
        HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", TRANSFORMERS_OFFLINE="1", DIFFUSERS_VERBOSITY="error",
        TRANSFORMERS_VERBOSITY="error", GRADIO_ANALYTICS_ENABLED="False", GRADIO_TEMP_DIR=cache,
    )
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", module="torchsde")
    # gradio reaches its own server through the machine's proxy otherwise.
    os.environ["NO_PROXY"] = ",".join(filter(None, [os.environ.get("NO_PROXY"), "localhost,127.0.0.1,::1"]))


def main(words: list[str] | None = None) -> int:
    """Run the host; the exit code is 1 after a sentence about what is wrong."""
    arguments = parse_arguments(words)
    # Images and uploads lie here: for this user alone, whoever may read the folder for temporary files.
    cache = tempfile.mkdtemp(prefix="onediff-page-")

    def end_at_once(*_: Any) -> NoReturn:
        # Until the server runs there is nothing to save, and an exception may come out of an import as another.
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


def listen(host: str, port: int | None) -> socket.socket:
    """A listening socket on host and port; without a port on the first free one from FIRST_PORT. It is held from the
    start, so that nobody waits for a model to learn that the port is taken. Raises Refusal with a sentence for the user
    where there is no such address, or its ports are taken."""
    ports = range(FIRST_PORT, FIRST_PORT + PORTS_TO_TRY) if port is None else range(port, port + 1)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except (OSError, ValueError) as error:
        # A name that is too long is a ValueError.
        cause = getattr(error, "strerror", None) or error
        raise Refusal(readable(f"There is no address for the host name {host!r}: {cause}.")) from error
    failure = ""
    for candidate in ports:
        try:
            return socket.create_server((str(address[0]), candidate), family=family, backlog=128)
        except (OSError, OverflowError) as error:
            failure = str(error)
    tried = f"Port {port}" if port is not None else f"Every port from {ports[0]} to {ports[-1]}"
    raise Refusal(f"{tried} on {host} is refused ({failure}); choose another with --port.")


def url_of(listener: socket.socket) -> str:
    """The address to open in a browser on this machine."""
    address, port = listener.getsockname()[:2]
    if address in ("0.0.0.0", "::"):
        address = "localhost"
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can reach the listener."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def run(arguments: argparse.Namespace, listener: socket.socket, cache: str) -> None:
    """Load the model and serve until interrupted. cache: gradio's folder. Raises Refusal with a sentence about what is
    wrong."""
    stay_offline_and_quiet(cache)
    from .models import load_model

    print("Loading the model ...", flush=True)
    model = load_model(arguments.model)
    from .modules import modules_importable
    from .server import fetch_nothing, make_app, serve

    fetch_nothing()
    only_this_machine = is_loopback(listener)
    if not only_this_machine:
        ask_for_an_account(arguments)
    with modules_importable():
        app = make_app(arguments, model, only_this_machine)
        for number in STOPPING:
            signal.signal(number, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            print(f"OneDiff demo running on {url_of(listener)}", flush=True)
            serve(app, listener)


def ask_for_an_account(arguments: argparse.Namespace) -> None:
    """Where others can reach the host, nobody uses it without an account; one is made up where none is given."""
    if not arguments.gradio_auth:
        password = secrets.token_urlsafe(12)
        arguments.gradio_auth = f"onediff:{password}"
        print(f"Others can reach this address, so it asks for an account: name onediff, password {password}. "
              "--gradio-auth NAME:PASSWORD sets your own.", flush=True)


def leave(code: int) -> NoReturn:
    """End the process at once: threads may be busy for long, and to take torch apart takes seconds."""
    # Among them the store's, which writes what it has not yet written.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())

"""The demo's command line: its options, and checks of the model's path and of the address to listen on.

install.py reads them before it installs anything, so nothing here needs more than the standard library.
"""
from __future__ import annotations

import argparse
import errno
import ipaddress
import socket
from pathlib import Path

from ..core.logs import readable
from ..core.refusal import Refusal
from . import EMOJI_DIT

# The folder for settings and caches: outputs, in the checkout.
DEFAULT_DATA_DIR = Path(__file__).resolve().parents[2] / "outputs"
FIRST_PORT = 7860
PORTS_TO_TRY = 100


def make_parser() -> argparse.ArgumentParser:
    """A parser of the demo's command line, which install.py --demo takes too."""
    parser = argparse.ArgumentParser(
        prog="install.py --demo", allow_abbrev=False,
        description="A small WebUI with OneDiff in it: txt2img in the browser.",
    )
    parser.add_argument(
        "--model", metavar="FILE_OR_FOLDER",
        help="a .safetensors checkpoint of Stable Diffusion 1.x, 2.x or XL, or a folder in diffusers' layout; or "
        f"{EMOJI_DIT.name}, a small transformer (default: the small emoji-sd)",
    )
    parser.add_argument(
        "--host", default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1, this machine only); for an address that others can reach, the "
        "demo makes up an account unless --gradio-auth gives one",
    )
    parser.add_argument("--port", type=int, help=f"port to listen on (default: the first free one from {FIRST_PORT})")
    parser.add_argument(
        "--data-dir", metavar="FOLDER", type=absolute, default=str(DEFAULT_DATA_DIR),
        help="folder for settings and caches (default: outputs, beside install.py)",
    )
    parser.add_argument(
        "--gradio-auth", type=accounts, metavar="USER:PASSWORD[,...]",
        help="accounts that may use the page and the API (default: everybody may)",
    )
    parser.add_argument(
        "--allowed-hosts", metavar="NAME[,...]",
        help="names by which browsers reach the demo, for example through a proxy (default: localhost and addresses; "
        "any name, with a --host that others can reach)",
    )
    return parser


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    """The demo's options, parsed from the command line's words; None for the process's own words. Also has `api` True,
    with which OneDiff's script adds its API. Ends the process after --help, and with exit code 2 after a message on a
    wrong option."""
    arguments = make_parser().parse_args(words)
    # An option of A1111.
    arguments.api = True
    return arguments


def accounts(text: str) -> str:
    """Check the value of --gradio-auth. Returns the text unchanged if it lists accounts as
    "user:password,user:password"; raises ArgumentTypeError otherwise."""
    if not all(user and colon for user, colon, _ in (account.partition(":") for account in text.split(","))):
        raise argparse.ArgumentTypeError("give accounts as user:password,user:password")
    return text


def absolute(text: str) -> str:
    """The path as an absolute one, with ~ expanded: install.py starts the demo in another folder than the user's."""
    return str(Path(text).expanduser().absolute())


def model_location(model: str) -> Path:
    """The absolute path of the model file or folder that a user gave as a path. Raises Refusal if nothing is there."""
    try:
        location = Path(model).expanduser()
        location.stat()
    except (OSError, ValueError, RuntimeError) as error:
        # RuntimeError: the home of an unknown user. ValueError: a null character.
        raise Refusal(f"There is no model file or folder {readable(model)}.") from error
    return location.absolute()


def words_for_the_demo(words: list[str]) -> list[str]:
    """The command line's words for a demo that install.py starts in another folder: the user's words, then --data-dir
    and --model again with absolute paths, which replace the user's.

    Checks everything now, before an installation of minutes: ends the process as parse_arguments does, and raises
    Refusal if the model does not exist or the address cannot be used.
    """
    arguments = parse_arguments(words)
    listen(arguments.host, arguments.port).close()
    # Of an option that is given twice, the last one counts.
    paths = ["--data-dir", arguments.data_dir]
    if arguments.model not in (None, EMOJI_DIT.name):
        paths += ["--model", str(model_location(arguments.model))]
    return [*words, *paths]


def listen(host: str, port: int | None) -> socket.socket:
    """A new socket that listens on a host and port; if port is None, on the first free one from FIRST_PORT. The caller
    closes it.

    The demo opens the socket before it loads the model, so that a port in use is reported at once. Raises Refusal with
    a sentence if the host has no address, or none of this machine, or if no port can be used.
    """
    ports = range(FIRST_PORT, FIRST_PORT + PORTS_TO_TRY) if port is None else range(port, port + 1)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except (OSError, ValueError) as error:
        # ValueError: a name that is too long.
        cause = getattr(error, "strerror", None) or error
        raise Refusal(readable(f"There is no address for the host name {host!r}: {cause}.")) from error
    failure = ""
    for candidate in ports:
        try:
            return socket.create_server((str(address[0]), candidate), family=family, backlog=128)
        except (OSError, OverflowError) as error:
            if getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
                raise Refusal(readable(f"{host} is not an address of this machine; choose another --host.")) from error
            failure = str(error)
    tried = f"Port {port}" if port is not None else f"The ports from {ports[0]} to {ports[-1]}"
    raise Refusal(f"{tried} on {host} cannot be used ({failure}); choose another with --port.")


def url_of(listener: socket.socket) -> str:
    """The URL of the listener, for a browser on this machine: with localhost if it listens on all addresses."""
    address, port = listener.getsockname()[:2]
    if address in ("0.0.0.0", "::"):
        address = "localhost"
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether the listener has a loopback address, so that only this machine can reach it."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback

"""Finding a port and holding it from the start, so that nobody waits for a model to learn that the port is taken."""
from __future__ import annotations

import ipaddress
import os
import socket

FIRST_PORT, PORTS_TO_TRY = 7860, 100


class CannotListen(Exception):
    """There is no such address, or its ports are taken; the message is a sentence for the user."""


def listen(host: str, port: int | None) -> socket.socket:
    """A listening socket on host and port; without a port on the first free one from FIRST_PORT."""
    ports = range(FIRST_PORT, FIRST_PORT + PORTS_TO_TRY) if port is None else range(port, port + 1)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise CannotListen(f"There is no address for the host name {host!r}: {error.strerror}.") from error
    failure = ""
    for candidate in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            if os.name == "posix":
                # Lets a restarted host reuse its port at once; on Windows it would let two servers share one.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((str(address[0]), candidate))
            listener.listen(128)
            return listener
        except (OSError, OverflowError) as error:
            listener.close()
            failure = str(error)
    tried = f"Port {port}" if port is not None else f"Every port from {ports[0]} to {ports[-1]}"
    raise CannotListen(f"{tried} on {host} is refused ({failure}); choose another with --port.")


def url_of(listener: socket.socket) -> str:
    """The address to open in a browser on this machine."""
    address, port = listener.getsockname()[:2]
    if address in ("0.0.0.0", "::"):
        address = "localhost"
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can reach the listener."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback

"""Finding a port and holding it from the start, so that nobody waits for a model to learn that the port is taken."""
from __future__ import annotations

import ipaddress
import socket

from ..core.refusal import Refusal

FIRST_PORT, PORTS_TO_TRY = 7860, 100


def listen(host: str, port: int | None) -> socket.socket:
    """A listening socket on host and port; without a port on the first free one from FIRST_PORT. Raises Refusal with a
    sentence for the user where there is no such address, or its ports are taken."""
    ports = range(FIRST_PORT, FIRST_PORT + PORTS_TO_TRY) if port is None else range(port, port + 1)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise Refusal(f"There is no address for the host name {host!r}: {error.strerror}.") from error
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

"""Finding a port and holding it from the start, so that nobody waits for a model to learn that the port is taken."""
from __future__ import annotations

import ipaddress
import os
import socket

FIRST_PORT, PORTS_TO_TRY = 7860, 100


class NoPort(Exception):
    """The host cannot listen where it should; the message is a sentence for the user."""


def listen(host: str, port: int | None) -> socket.socket:
    """A listening socket on host and port; without a port on the first free one from FIRST_PORT."""
    family, address = resolve(host)
    if port is not None:
        if not 0 <= port <= 65535:
            raise NoPort(f"There is no port {port}: ports go up to 65535.")
        try:
            return bound_socket(family, address, port)
        except OSError as error:
            raise NoPort(
                f"Port {port} on {host} cannot be used ({reason(error)}); choose another with --port."
            ) from error
    failure: OSError | None = None
    for candidate in range(FIRST_PORT, FIRST_PORT + PORTS_TO_TRY):
        try:
            return bound_socket(family, address, candidate)
        except OSError as error:
            failure = error
    raise NoPort(
        f"None of the ports {FIRST_PORT} to {FIRST_PORT + PORTS_TO_TRY - 1} on {host} can be used ({reason(failure)}); "
        "choose another with --port."
    )


def resolve(host: str) -> tuple[socket.AddressFamily, str]:
    """The address family and address of a host name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise NoPort(f"There is no address for the host name {host!r} ({reason(error)}).") from error
    return found[0], str(found[4][0])


def bound_socket(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    """A listening socket; OSError when the port is taken."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            # Lets a restarted host reuse its port at once; on Windows it would let two servers share one.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def reason(error: OSError | None) -> str:
    return (error.strerror or str(error)).lower() if error else "unknown"


def url_of(listener: socket.socket) -> str:
    """The address to open in a browser on this machine."""
    address, port = listener.getsockname()[:2]
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if parsed.is_unspecified:
        address = "127.0.0.1" if parsed.version == 4 else "::1"
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can reach the listener."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback

"""Finding a port and holding it from the start, so that nobody waits for a model to learn that the port is taken."""
from __future__ import annotations

import ipaddress
import os
import socket

FIRST_PORT, PORTS_TO_TRY = 7860, 100


def listen(host: str, port: int | None) -> socket.socket | str:
    """A listening socket on host and port; without a port on the first free one from FIRST_PORT. Where there is none,
    a sentence for the user."""
    if port is not None and not 0 <= port <= 65535:
        return f"There is no port {port}: ports go up to 65535."
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        return f"There is no address for the host name {host!r} ({reason(error)})."
    failure = ""
    for candidate in range(FIRST_PORT, FIRST_PORT + PORTS_TO_TRY) if port is None else [port]:
        try:
            return bound_socket(found[0], str(found[4][0]), candidate)
        except OSError as error:
            failure = reason(error)
    ports = f"None of the ports {FIRST_PORT} to {FIRST_PORT + PORTS_TO_TRY - 1}"
    tried, cannot = (ports, "can") if port is None else (f"Port {port}", "cannot")
    return f"{tried} on {host} {cannot} be used ({failure}); choose another with --port."


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


def reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


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

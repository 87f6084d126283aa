"""Which web pages may send a request: browsers tell of them in Origin, Sec-Fetch-Site and Host, programs do not."""
from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

READING = ("GET", "HEAD")
ONES_OWN = ("same-origin", "none")
# A page that a browser takes for nobody's: a sandboxed frame, a file.
NOBODY = "null"
FOREIGN_PAGE = "A page of another site may not use this API; --cors-allow-origins lets it."
# What of a WebUI's command line lets others than this machine reach it, or gives it a name that we cannot know.
OPEN_TO_OTHERS = ("listen", "server_name", "share", "ngrok", "subpath")


@dataclass(frozen=True)
class Origins:
    """Whose pages may send requests. Those of the server itself may always.

    allowed, pattern: other origins, as --cors-allow-origins and its regex have them. strict_host: the server is asked
    by address, as localhost or by one of names; a page under another name is another site's, whose name was made to
    lead here once the page was loaded (DNS rebinding).
    """

    allowed: Collection[str] = ()
    pattern: str | None = None
    strict_host: bool = False
    names: Collection[str] = ()

    def is_foreign(self, headers: Mapping[str, str]) -> bool:
        """Whether a browser sent this for a page of another site. headers: by names in lower case."""
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if site is None and origin is None or origin != NOBODY and site in ONES_OWN:
            return False
        # A browser that does not name the relation, or has none to name: no TLS.
        # The second is a proxy's: no page of another site can have it sent.
        hosts = (headers.get("host"), headers.get("x-forwarded-host"))
        if site is None and origin is not None and any(self.is_own(origin, host) for host in hosts):
            return False
        return not self.lets_in(origin)

    def is_own(self, origin: str, host: str | None) -> bool:
        """Whether an origin is the server's that was asked by this host name.

        The scheme may be that of a proxy; some proxies leave out the port.
        """
        if not host or not self.knows(host):
            return False
        address = origin.lower().partition("://")[2]
        return host.lower() in (address, address.rpartition(":")[0])

    def lets_in(self, origin: str | None) -> bool:
        """Whether the user has allowed an origin."""
        return (
            origin in self.allowed or "*" in self.allowed
            or bool(self.pattern and re.fullmatch(self.pattern, origin or ""))
        )

    def knows(self, host: str | None) -> bool:
        """Whether a Host header can be the server's own."""
        name = host_name(host or "")
        return name in self.names or (is_fixed(name) if self.strict_host else bool(name))


def host_name(host: str) -> str:
    """A Host header without its port, in lower case; an IPv6 address without its brackets."""
    address = re.fullmatch(r"\[(.*)\](:\d*)?", host)
    return address[1].lower() if address else host.partition(":")[0].rstrip(".").lower()


def is_fixed(name: str) -> bool:
    """Whether no name server says where a host name leads: an address, or localhost."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def origins_of(cmd_opts: Any) -> Origins:
    """As a WebUI's command line has it; where that does not tell who can reach the server, everybody can."""
    allowed, pattern = (getattr(cmd_opts, f"cors_allow_origins{end}", None) for end in ("", "_regex"))
    of_this_machine = hasattr(cmd_opts, "listen") and not any(getattr(cmd_opts, flag, None) for flag in OPEN_TO_OTHERS)
    return Origins(allowed.split(",") if allowed else (), pattern, strict_host=of_this_machine)

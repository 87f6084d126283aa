"""Checks the demo's accounts. Wrong passwords make the next attempts from the same address wait; other addresses can
still log in."""
from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException
from starlette.types import Receive, Scope, Send

# The number of the first wrong password that makes the client wait: FIRST_WAIT seconds, and twice as long after each
# further one, up to LONGEST_WAIT.
FIRST_FAILURE_TO_WAIT = 5
FIRST_WAIT = 1.0
LONGEST_WAIT = 30.0
# After this many seconds without a wrong password, the count starts at 0 again. MOST_COUNTS counts are kept, the
# newest.
FORGIVEN_AFTER = 600.0
MOST_COUNTS = 1000
# The prefix length of an IPv6 network that belongs to one client.
IPV6_NETWORK = 64
# In characters. A longer password is always wrong, even if it is the account's: hashing it would take longer.
LONGEST_PASSWORD = 1000
WAIT = "Too many wrong passwords from this address: try again in {} s."

# The address of the client whose request is being answered; KnowsClient sets it.
client: ContextVar[str] = ContextVar("client", default="")


@dataclass
class Failures:
    """The wrong passwords for one account from one client. count: their number. until: when the next password may be
    tried. last: when the last wrong password came. until and last are in seconds, of the clock of Logins."""

    count: int = 0
    until: float = 0.0
    last: float = 0.0


class Logins:
    """Checks names and passwords for gradio (`auth`). While a client must wait, its login is answered with status 429.

    Wrong passwords are counted for each pair of account and client (network_of), so guessing does not lock out the
    owner elsewhere. All unknown names count as one account.
    """

    def __init__(self, accounts: Mapping[str, str], now: Callable[[], float] = time.monotonic) -> None:
        """accounts: passwords by name. now: a monotonic clock, in seconds."""
        self._accounts = {name: digest(password) for name, password in accounts.items()}
        self._now = now
        self._failures: OrderedDict[tuple[str, str], Failures] = OrderedDict()

    async def check(self, name: str, password: str) -> bool:
        """Whether the account exists and has this password. A wrong password is counted, a right one resets the count.
        Raises HTTPException with status 429 if the client must wait, also for the right password; such an attempt is
        not counted. A coroutine, so that gradio calls it in the event loop's thread, where two calls cannot
        interleave."""
        now = self._now()
        key = (network_of(client.get()), name if name in self._accounts else "")
        failures = self._failures.get(key, Failures())
        if now - failures.last > FORGIVEN_AFTER:
            failures = Failures()
        if now < failures.until:
            seconds = math.ceil(failures.until - now)
            raise HTTPException(429, WAIT.format(seconds), {"Retry-After": str(seconds)})
        # Also compared if there is no such account, so that the time does not reveal whether there is.
        expected = self._accounts.get(name, digest(""))
        is_right = hmac.compare_digest(expected, digest(password[:LONGEST_PASSWORD])) and name in self._accounts
        if is_right and len(password) <= LONGEST_PASSWORD:
            self._failures.pop(key, None)
            return True
        count = failures.count + 1
        further = count - FIRST_FAILURE_TO_WAIT
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(further, 10)) if further >= 0 else 0.0
        self._failures[key] = Failures(count, now + wait, now)
        self._failures.move_to_end(key)
        while len(self._failures) > MOST_COUNTS:
            self._failures.popitem(last=False)
        return False


class KnowsClient:
    """ASGI middleware that writes the address of each request's client to the context variable `client`, for Logins;
    "" if the server does not know it."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Note the client, then let the app answer the request."""
        client.set((scope.get("client") or ("",))[0])
        await self.app(scope, receive, send)


def accounts_in(text: str) -> dict[str, str]:
    """The passwords by account name, from a text "name:password,name:password" that command_line.accounts has checked;
    {} for "". A password may contain colons, but no comma."""
    return dict(account.split(":", 1) for account in text.split(",") if account)


def digest(password: str) -> bytes:
    """The SHA-256 of a password. Digests are compared instead of passwords, because they all have one length: the
    duration of a comparison does not reveal a password's."""
    return hashlib.sha256(password.encode("utf-8", "surrogatepass")).digest()


def network_of(address: str) -> str:
    """The name of the client to which an address belongs, for Logins. For an IPv6 address, it is the network of
    IPV6_NETWORK bits, without the zone ("%eth0"); for any other text, the text itself.

    An IPv4-mapped address ("::ffff:192.0.2.1", as a server for IPv4 and IPv6 sees IPv4 clients) is its own name too,
    because all such addresses are in one network of IPV6_NETWORK bits."""
    with contextlib.suppress(ValueError):
        found = ipaddress.ip_address(address.partition("%")[0])
        if found.version == 6 and found.ipv4_mapped is None:
            return str(ipaddress.ip_network((found, IPV6_NETWORK), strict=False))
    return address

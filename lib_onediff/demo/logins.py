"""Accounts of the demo. Passwords that are tried one after the other are slowed; nobody else is locked out by that."""
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

# Wrong passwords that cost nothing, and how long each further one has the next wait.
FREE_FAILURES = 5
FIRST_WAIT = 1.0
LONGEST_WAIT = 30.0
# After so long without a wrong password all are forgiven. So many counts are kept, the last.
FORGIVEN_AFTER = 600.0
MOST_COUNTS = 1000
# Who has an IPv6 address has all of its network.
IPV6_NETWORK = 64
LONGEST_PASSWORD = 1000
WAIT = "Too many wrong passwords from this address: try again in {} s."

client: ContextVar[str] = ContextVar("client", default="")


@dataclass
class Failures:
    """Wrong passwords for an account from an address. until: when the next may be tried (time.monotonic())."""

    count: int = 0
    until: float = 0.0
    last: float = 0.0


class Logins:
    """Checks names and passwords for gradio, and has the login answer 429 while an address must wait.

    An account is counted for each address by itself: whoever tries passwords slows that account there, and its owner
    elsewhere not at all. All names that are no account's are one.
    """

    def __init__(self, accounts: Mapping[str, str], now: Callable[[], float] = time.monotonic) -> None:
        self._accounts = {name: digest(password) for name, password in accounts.items()}
        self._now = now
        self._failures: OrderedDict[tuple[str, str], Failures] = OrderedDict()

    async def check(self, name: str, password: str) -> bool:
        """Whether the password is the account's. Raises HTTPException 429. A coroutine, so that gradio calls it in the
        event loop's thread, where two cannot count at once."""
        now = self._now()
        key = (network_of(client.get()), name if name in self._accounts else "")
        failures = self._failures.get(key, Failures())
        if now - failures.last > FORGIVEN_AFTER:
            failures = Failures()
        if now < failures.until:
            seconds = math.ceil(failures.until - now)
            raise HTTPException(429, WAIT.format(seconds), {"Retry-After": str(seconds)})
        # Compared as well where there is no such account, so that the time tells nothing.
        expected = self._accounts.get(name, digest(""))
        is_right = hmac.compare_digest(expected, digest(password[:LONGEST_PASSWORD])) and name in self._accounts
        if is_right and len(password) <= LONGEST_PASSWORD:
            self._failures.pop(key, None)
            return True
        more = failures.count + 1 - FREE_FAILURES
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(more, 10)) if more >= 0 else 0.0
        self._failures[key] = Failures(failures.count + 1, now + wait, now)
        self._failures.move_to_end(key)
        while len(self._failures) > MOST_COUNTS:
            self._failures.popitem(last=False)
        return False


class KnowsClient:
    """ASGI middleware that tells Logins by whom a request was sent."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client.set((scope.get("client") or ("",))[0])
        await self.app(scope, receive, send)


def accounts_in(text: str) -> dict[str, str]:
    """The password of each account in "name:password,name:password", which a password may hold colons of."""
    return dict(account.split(":", 1) for account in text.split(",") if account)


def digest(password: str) -> bytes:
    """Of one length, whatever the password's."""
    return hashlib.sha256(password.encode("utf-8", "surrogatepass")).digest()


def network_of(address: str) -> str:
    """What an address is counted as."""
    with contextlib.suppress(ValueError):
        found = ipaddress.ip_address(address.partition("%")[0])
        if found.version == 6 and found.ipv4_mapped is None:
            return str(ipaddress.ip_network((found, IPV6_NETWORK), strict=False))
    return address

"""Logins of the demo: wrong passwords make a client wait before the next try, and no other client."""
from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI, HTTPException, Request
from starlette.testclient import TestClient

from lib_onediff.demo import logins
from lib_onediff.demo.logins import KnowsClient, Logins, accounts_in

ACCOUNTS = {"ann": "one", "bob": "two:parts"}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log_in(clock: Clock) -> Any:
    """A function that tries a password: returns whether it is right, or the seconds that the client must wait first."""
    checked = Logins(ACCOUNTS, clock)

    def log_in_from(name: str, password: str, address: str = "10.0.0.1") -> Any:
        token = logins.client.set(address)
        try:
            return asyncio.run(checked.check(name, password))
        except HTTPException as refused:
            assert refused.status_code == 429 and "try again in" in refused.detail
            return int((refused.headers or {})["Retry-After"])
        finally:
            logins.client.reset(token)

    log_in_from.logins = checked  # type: ignore[attr-defined]
    return log_in_from


def test_accounts_are_parsed_from_the_text_on_the_command_line() -> None:
    """The text: name:password,name:password. A password may contain a colon."""
    assert accounts_in("ann:one,bob:two:parts") == ACCOUNTS and accounts_in("") == {}


def test_right_passwords_are_accepted_and_wrong_ones_are_not(log_in: Any) -> None:
    assert log_in("ann", "one") is True and log_in("bob", "two:parts") is True
    wrong = [("ann", "two"), ("ann", ""), ("", ""), ("eve", ""), ("eve", "one"), ("ann", "one" + "x" * 2000)]
    for name, password in (*wrong, ("bob", "\ud800")):
        assert log_in(name, password) is False


def test_after_five_wrong_passwords_each_further_one_doubles_the_wait(log_in: Any, clock: Clock) -> None:
    """log_in() returns False for a wrong password, and the seconds to wait (1, 2, 4, 8) while no password is checked.
    After a pause of 1000 seconds, the wrong passwords are forgotten."""
    assert [log_in("ann", str(number)) for number in range(5)] == [False] * 5
    waits = []
    for _ in range(8):
        waits.append(log_in("ann", "wrong"))
        clock.now += 0.001 if waits[-1] is False else waits[-1]
    assert waits == [1, False, 2, False, 4, False, 8, False]
    clock.now += 1000
    assert log_in("ann", "wrong") is False, "the wrong passwords are forgotten"


def test_fewer_than_140_passwords_can_be_tried_in_an_hour(log_in: Any, clock: Clock) -> None:
    """The client tries a password every half second. Tries during which no password is checked do not count."""
    guesses = 0
    end = clock.now + 3600
    while clock.now < end:
        guesses += log_in("ann", "wrong") is False
        clock.now += 0.5
    assert guesses < 140


def test_wrong_passwords_delay_only_the_account_and_address_that_they_were_tried_with(
    log_in: Any, clock: Clock
) -> None:
    """Nobody can lock a user out by trying wrong passwords for her account from another address. The right password
    resets the count."""
    for name in ("ann", *map(str, range(50))):
        for _ in range(10):
            log_in(name, "wrong")
    assert log_in("ann", "one", "10.0.0.2") is True, "her own address"
    assert log_in("bob", "two:parts") is True, "another account at the same address"
    assert log_in("ann", "one") is not True
    clock.now += 31
    assert log_in("ann", "one") is True
    assert log_in("ann", "wrong") is False, "the right password resets the count"


def test_all_addresses_of_an_ipv6_network_count_as_one_client(log_in: Any) -> None:
    """Providers give each customer a whole network (/64), so that each try could come from another address."""
    for number in range(6):
        log_in("ann", "wrong", f"2001:db8::{number:x}")
    assert log_in("ann", "one", "2001:db8::ffff") is not True
    assert log_in("ann", "one", "2001:db8:0:1::1") is True


def test_the_number_of_counts_kept_in_memory_is_limited(log_in: Any) -> None:
    """A count is that of the wrong passwords for one account from one address. At most MOST_COUNTS of them are kept."""
    for number in range(logins.MOST_COUNTS + 100):
        log_in("ann", "wrong", f"address {number}")
    assert len(log_in.logins._failures) == logins.MOST_COUNTS


def test_the_login_check_is_a_coroutine_function_and_gets_the_address_of_the_client() -> None:
    """gradio awaits a check that is a coroutine function, and passes on its exceptions. An app of FastAPI stands for
    gradio's; the middleware KnowsClient gives the check the address."""
    assert inspect.iscoroutinefunction(Logins(ACCOUNTS).check)
    app = FastAPI()
    checked = Logins(ACCOUNTS)
    app.add_middleware(KnowsClient)

    @app.post("/login")
    async def login(request: Request) -> dict[str, Any]:
        return {"in": await checked.check("ann", "wrong")}

    with TestClient(app, client=("10.9.8.7", 5000)) as browser:
        answers = [browser.post("/login").status_code for _ in range(8)]
    assert answers == [200] * 5 + [429] * 3
    assert list(checked._failures) == [("10.9.8.7", "ann")]

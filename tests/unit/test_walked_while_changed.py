"""Collections that a page or a purge iterates while another thread adds to them."""
from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from test_history import KEY
from torch import nn

from lib_onediff.core.table import ShapeTable
from lib_onediff.core.weak_dictionary import WeakDictionary

SECONDS = 0.5


@pytest.fixture(autouse=True)
def threads_take_turns_often() -> Iterator[None]:
    """Let Python switch between threads every microsecond."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def while_another_adds(add: Callable[[int], object], walk: Callable[[], object]) -> None:
    """Call walk() repeatedly while another thread calls add(0), add(1), and so on. Raises what walk() raises."""
    ended = threading.Event()

    def adding() -> None:
        number = 0
        while not ended.is_set():
            add(number)
            number += 1

    thread = threading.Thread(target=adding)
    thread.start()
    try:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            walk()
    finally:
        ended.set()
        thread.join()


def test_entries_of_the_shape_table_can_be_forgotten_while_another_thread_adds_some() -> None:
    """Python raises RuntimeError if a dictionary changes while it is iterated."""
    table = ShapeTable()
    keys = [dataclasses.replace(KEY, batch=number) for number in range(2000)]
    for key in keys:
        table.entry(key)

    def add(number: int) -> None:
        table.entry(keys[number % 2000])

    while_another_adds(add, lambda: (table.forget(set(keys[:2])), table.entries()))


def test_a_weak_dictionary_can_be_listed_while_another_thread_changes_it() -> None:
    """Python raises RuntimeError if a dictionary changes while it is iterated."""
    modules = [nn.Identity() for _ in range(1000)]
    known: WeakDictionary[nn.Module, int] = WeakDictionary({module: 0 for module in modules[:500]})

    def add(number: int) -> None:
        known[modules[number % 1000]] = number
        known.pop(modules[(number + 500) % 1000], None)

    while_another_adds(add, lambda: (known.items(), known.keys(), known.values(), list(known), set(known)))


def test_a_weak_dictionary_lists_only_keys_that_are_alive() -> None:
    known: WeakDictionary[nn.Module, int] = WeakDictionary()
    here = nn.Identity()
    gone = nn.Identity()
    known[here] = 1
    known[gone] = 2
    del gone
    assert known.items() == [(here, 1)] and list(known) == known.keys() == [here] and known.values() == [1]

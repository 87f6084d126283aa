"""Code and state are read while other threads import modules and set attributes, as in WebUIs."""
from __future__ import annotations

import gc
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import pytest
from builders import diffusers_unet

from lib_onediff.weights.code import Code, objects_in
from lib_onediff.weights.module_tree import Tree
from lib_onediff.weights.snapshot import snapshot
from lib_onediff.weights.values import Digests, Tokens


@contextmanager
def written_meanwhile(write: Callable[[str], object]) -> Iterator[None]:
    """A context in which another thread calls write() with new names, and threads switch as often as possible."""
    over = threading.Event()
    before = sys.getswitchinterval()

    def work() -> None:
        number = 0
        while not over.is_set():
            write(f"onediff_test_{number}")
            number += 1

    thread = threading.Thread(target=work)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(before)


def flipping(space: dict) -> Callable[[str], object]:
    """A function for written_meanwhile that adds names to a dictionary, and removes them again at every 50th."""
    def write(name: str) -> None:
        space[name] = types.ModuleType(name)
        if len(space) % 50 == 0:
            for other in [one for one in space.copy() if one.startswith("onediff_test_")]:
                del space[other]

    return write


@pytest.fixture
def modules() -> Iterator[dict]:
    yield sys.modules
    for name in [one for one in sys.modules.copy() if one.startswith("onediff_test_")]:
        del sys.modules[name]


def test_code_is_read_while_another_thread_imports(modules: dict) -> None:
    """A garbage collection, which may happen whenever an object is made, may let another thread run. Here it adds
    modules to sys.modules itself, as an import in that thread would."""
    unet = diffusers_unet()
    numbers = count()
    found = len(Code([type(unet)]).functions)
    before = gc.callbacks.copy()
    threshold = gc.get_threshold()
    gc.callbacks.append(lambda phase, info: modules.update({f"onediff_test_{next(numbers)}": types.ModuleType("")}))
    gc.set_threshold(50)
    try:
        assert len(Code([type(unet)]).functions) == found
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks[:] = before
    assert next(numbers) > 0


def test_a_snapshot_of_an_objects_attributes_is_made_while_another_thread_sets_them() -> None:
    """The size of the object's vars() changes meanwhile, so that iterating over it in Python raises."""
    held = types.SimpleNamespace(of_a_user=1)
    with written_meanwhile(flipping(vars(held))):
        for _ in range(300):
            assert snapshot(held)


def test_a_network_is_read_while_another_thread_gives_it_attributes() -> None:
    """Tree reads the attributes of all modules, while one of the modules gets new ones. Nothing is raised: a dictionary
    that changes its size during an iteration would raise."""
    unet = diffusers_unet()
    resnet = unet.down_blocks[0].resnets[0]
    with written_meanwhile(lambda name: len(vars(resnet)) < 3000 and setattr(resnet, name, "")):
        for _ in range(5):
            assert Tree(unet, frozenset(), frozenset()).digest


class Lazy(OrderedDict):
    """As transformers' mappings of its models: it cannot be copied, and iterating over it imports modules."""

    def __init__(self, one: object, other: object) -> None:
        super().__init__(one=one, other=other)

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("walked")

    keys = values = items = __getitem__ = copy = __iter__


class LazySet(set):
    """A set that cannot be copied or iterated over."""

    def __init__(self, one: object, other: object) -> None:
        super().__init__({one, other})

    def __iter__(self) -> Iterator[object]:
        raise AssertionError("walked")

    copy = __iter__


@pytest.mark.parametrize("kind", [Lazy, LazySet])
def test_containers_of_foreign_classes_are_read_without_calling_their_methods(kind: type) -> None:
    """kind: a class whose objects raise if they are iterated over or copied. Their contents must still be found, and be
    in snapshots and digests."""
    mapping = kind(gc, len)
    assert objects_in(mapping) == [len]
    assert snapshot(mapping) == snapshot(kind(gc, len)) != snapshot(kind(gc, max))
    digest = lambda value: Digests(Tokens(), {}).of(value)  # noqa: E731
    assert digest(mapping) == digest(kind(gc, len)) != digest(kind(gc, max))

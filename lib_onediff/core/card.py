"""The card that computes, and TuningCache: the choices that were measured to be fastest on a card, such as block sizes
and attention implementations, under names that contain the card's.

Kernels, CUDA graphs and events go to torch's current card, while a model may lie on another: launch inside on_card().
"""
from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

NONE = -1


def on_card(device: torch.device) -> AbstractContextManager[object]:
    """A context manager that makes this card torch's current one inside; does nothing for a CPU. Microseconds."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def current_card() -> int:
    """The index of the card that computes here; NONE where no GPU is in use."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else NONE


def card_name(device: torch.device) -> str:
    """The model of a card, such as "NVIDIA H200"; for any other device its type, such as "cpu"."""
    is_card = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if is_card else device.type


def named(choice: str) -> str:
    """The name in TuningCache of a choice for the current card: it holds on cards of the same model alone."""
    card = current_card()
    return f"{choice}, {'cpu' if card == NONE else card_name(torch.device('cuda', card))}"


class TuningCache:
    """Values by name, in memory, and also in a store once one is attached. Safe on any thread.

    A value is anything that JSON can hold, and must not be changed after set(). Values from a store may have been
    written by anybody: callers of get() must check that a value makes sense.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._save: Callable[[str, Any], object] = lambda name, value: None

    def get(self, name: str) -> Any | None:
        """The value of a name; None if nothing was chosen."""
        return self._values.get(name)

    def set(self, name: str, value: Any) -> None:
        """Set the value of a name. Raises TypeError for a value that JSON cannot hold."""
        json.dumps(value)
        with self._lock:
            self._values[name] = value
            save = self._save
        save(name, value)

    def clear(self) -> None:
        """Forget everything in memory. The caller clears the store, before any value is set again."""
        with self._lock:
            self._values = {}

    def attach(self, load: Callable[[], dict[str, Any]], save: Callable[[str, Any], object]) -> None:
        """Take the values that load() returns, and save() every value that is set from now on. Safe to call again.

        Values that were set before are saved now, and replace loaded ones: they were measured later. save must return
        at once.
        """
        loaded = load()
        with self._lock:
            before = self._values
            self._save = save
            self._values = {**loaded, **before}
        for name, value in before.items():
            save(name, value)

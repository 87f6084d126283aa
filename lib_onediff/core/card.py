"""The card that computes: whoever launches makes it torch's current one, and what was measured on it carries its name.
TuningCache holds what was measured to be best: block sizes, attention backends. Whoever measures is handed one.

Kernels, CUDA graphs and events go to the current card; a model may lie on another.
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
    """Inside, this card is torch's current one; afterwards, the one that was. Microseconds; nothing for what is none.
    """
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def current_card() -> int:
    """The index of the card that computes here; NONE where no GPU is in use."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else NONE


def card_name(device: torch.device) -> str:
    """What tells kinds of cards apart, such as "NVIDIA H200"; of what is none, the kind of device ("cpu")."""
    is_card = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if is_card else device.type


def named(choice: str) -> str:
    """The name of a choice that was measured on the card that computes here, and holds on cards of its kind alone."""
    card = current_card()
    return f"{choice}, {'cpu' if card == NONE else card_name(torch.device('cuda', card))}"


class TuningCache:
    """Values by name, in memory, and in a store from the moment that one is attached. Safe on any thread.

    A value is anything that JSON can hold and must not be changed once it is here. What comes from a store may have
    been written by anybody: whoever asks for a value must look whether it makes sense.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._save: Callable[[str, Any], object] = lambda name, value: None

    def get(self, name: str) -> Any | None:
        """What was chosen under a name, or None."""
        return self._values.get(name)

    def set(self, name: str, value: Any) -> None:
        """Choose. Raises TypeError for a value that JSON cannot hold."""
        json.dumps(value)
        with self._lock:
            self._values[name] = value
            save = self._save
        save(name, value)

    def clear(self) -> None:
        """Forget everything. What a store has kept of it is the store's to forget, before anything is chosen again."""
        with self._lock:
            self._values = {}

    def attach(self, load: Callable[[], dict[str, Any]], save: Callable[[str, Any], object]) -> None:
        """Know from now on what load() knows, and save what is chosen; safe to call again.

        What was chosen before is saved now, and counts more than what was loaded: it was measured later. save must
        return at once.
        """
        loaded = load()
        with self._lock:
            before = self._values
            self._save = save
            self._values = {**loaded, **before}
        for name, value in before.items():
            save(name, value)

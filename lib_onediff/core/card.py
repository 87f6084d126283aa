"""The GPU that computes; and TuningCache: the choices that were measured to be fastest on a GPU model, such as block
sizes and attention implementations.

Kernels, CUDA graphs and events go to torch's current GPU, and a model may be on another: launch inside on_card().
"""
from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

# current_card() returns this without a GPU, and before the first use of CUDA in this process.
NONE = -1


def on_card(device: torch.device) -> AbstractContextManager[object]:
    """A context in which this GPU is torch's current one; for other devices a context that does nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def current_card() -> int:
    """The index of torch's current GPU. NONE if there is no GPU, or this process has not used CUDA yet: CUDA is not
    initialized for this."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else NONE


def card_name(device: torch.device) -> str:
    """The model name of a GPU, such as "NVIDIA H200"; for any other device its type, such as "cpu"."""
    is_card = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if is_card else device.type


def name_on_this_card(choice: str) -> str:
    """The name of a choice in TuningCache for the current GPU: the GPU's model name is added ("cpu" if current_card()
    is NONE), because a measurement is valid only for GPUs of the same model."""
    card = current_card()
    return f"{choice}, {'cpu' if card == NONE else card_name(torch.device('cuda', card))}"


class TuningCache:
    """Measured choices by name (see name_on_this_card), in memory, and on the disk once a store is attached. Safe in
    any thread.

    A value is anything that JSON can represent, and must not be changed after set(). Values from a store may be
    damaged: callers of get() must check them.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._save: Callable[[str, Any], object] = lambda name, value: None

    def get(self, name: str) -> Any | None:
        """The value of a name; None if it has none."""
        return self._values.get(name)

    def set(self, name: str, value: Any) -> None:
        """Set the value of a name, and save it if a store is attached. Raises TypeError for a value that JSON cannot
        represent."""
        json.dumps(value)
        with self._lock:
            self._values[name] = value
            save = self._save
        save(name, value)

    def clear(self) -> None:
        """Forget all values in memory. The values in the store stay, and so does the store: the caller has to clear it
        as well, before the next set()."""
        with self._lock:
            self._values = {}

    def attach(self, load: Callable[[], dict[str, Any]], save: Callable[[str, Any], object]) -> None:
        """Attach a store: add the values that load() returns, and save all values that are in memory at this call.

        If a name has a value in memory and one in the store, the value in memory is kept, because it was measured
        later. save: called as save(name, value), now and at every later set(); it must return at once. Another call of
        attach() replaces the store.
        """
        loaded = load()
        with self._lock:
            before = self._values
            self._save = save
            self._values = {**loaded, **before}
        for name, value in before.items():
            save(name, value)

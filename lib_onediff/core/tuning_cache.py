"""What was measured to be best on this machine: block sizes, attention backends. Whoever measures is handed one."""
from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


class TuningCache:
    """Values by name, in memory, and in a store from the moment that one is attached. Safe on any thread.

    A value is anything that JSON can hold and must not be changed once it is here. What comes from a store may have
    been written by anybody: whoever asks for a value must look whether it makes sense.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._save: Callable[[str, Any], object] = lambda name, value: None

    def get(self, name: str) -> Any | None:
        """What was chosen under a name, or None."""
        return self._values.get(name)

    def set(self, name: str, value: Any) -> None:
        """Choose. Raises TypeError for a value that JSON cannot hold."""
        json.dumps(value)
        self._values[name] = value
        self._save(name, value)

    def clear(self) -> None:
        """Forget everything. What a store has kept of it is the store's to forget, before anything is chosen again."""
        self._values = {}

    def attach(self, load: Callable[[], dict[str, Any]], save: Callable[[str, Any], object]) -> None:
        """Know from now on what load() knows, and save what is chosen; safe to call again.

        What was chosen before is saved now, and counts more than what was loaded: it was measured later. save must
        return at once.
        """
        self._save, before = save, self._values
        self._values = {**load(), **before}
        for name, value in before.items():
            save(name, value)

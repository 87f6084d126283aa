"""What runs extensions' wrappers around a function."""
from __future__ import annotations

from typing import Any


class WrapperExecutor:
    def __init__(self, function: Any, wrappers: list[Any]) -> None:
        self.function, self.wrappers = function, wrappers

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        if self.wrappers:
            return self.wrappers[0](WrapperExecutor(self.function, self.wrappers[1:]).execute, *args, **kwargs)
        return self.function(*args, **kwargs)

"""Replace a method of a host's class, and take the replacement off without undoing anybody else's."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

# replacement(original, self, *args, **kwargs) -> what the method returns
Replacement = Callable[..., Any]


def active_patches(owner: type, method: str) -> list[ClassPatch]:
    """Our patches that are at work on a method, from the top of the chain down to the first that is not ours."""
    found = []
    function = owner.__dict__[method]
    while isinstance(getattr(function, "patch", None), ClassPatch):
        found.append(function.patch)
        function = function.patch.original
    return [patch for patch in found if patch.active]


class ClassPatch:
    """One replaced method. Where somebody has patched over ours since, ours stays in the chain but does nothing."""

    def __init__(self, owner: type, method: str, replacement: Replacement) -> None:
        self.owner, self.method = owner, method
        self.original = owner.__dict__[method]
        self.active = False
        self._in_chain = False

        @functools.wraps(self.original)
        def patched(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return self.original(module, *args, **kwargs)
            return replacement(self.original, module, *args, **kwargs)

        patched.patch = self
        self.function = patched

    def apply(self) -> None:
        """Put the replacement in place; safe to call twice."""
        if not self._in_chain:
            self.original = self.owner.__dict__[self.method]
            setattr(self.owner, self.method, self.function)
            self._in_chain = True
        self.active = True

    def undo(self) -> None:
        """Take the replacement off; safe to call twice."""
        self.active = False
        if self._in_chain and self.owner.__dict__[self.method] is self.function:
            setattr(self.owner, self.method, self.original)
            self._in_chain = False

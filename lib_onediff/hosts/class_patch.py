"""Replace a method of a host's class, and take the replacement off without undoing anybody else's."""
from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..guard import Guard

# replacement(original, self, *args, **kwargs) -> what the method returns
Replacement = Callable[..., Any]
# declined(self, reason): the original runs in place of the replacement.
Declined = Callable[[Any, str], object]


def active_patches(owner: type, method: str) -> list[ClassPatch]:
    """Our patches that are at work on a method, from the top of the chain down to the first that is not ours."""
    found = []
    function = owner.__dict__[method]
    while isinstance(getattr(function, "patch", None), ClassPatch):
        found.append(function.patch)
        function = function.patch.original
    return [patch for patch in found if patch.active]


def nobody_is_told(module: Any, reason: str) -> None:
    pass


class ClassPatch:
    """One replaced method. Where somebody has patched over ours since, ours stays in the chain but does nothing.

    An error of the replacement's is the guard's affair: the original runs. hook: what the method is, in words for the
    user.
    """

    def __init__(
        self, owner: type, method: str, replacement: Replacement, guard: Guard, hook: str,
        declined: Declined = nobody_is_told,
    ) -> None:
        self.owner, self.method = owner, method
        self.original = owner.__dict__[method]
        self.active = False
        self._in_chain = False

        @functools.wraps(self.original)
        def patched(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return self.original(module, *args, **kwargs)
            tell = functools.partial(declined, module)
            return self._serve(hook, replacement, self.original, tell, module, *args, **kwargs)

        self._serve = guard.serve
        self._is_traced = True
        vars(patched)["patch"] = self
        self.function = patched

    def apply(self) -> None:
        """Put the replacement in place; safe to call twice."""
        if not self._in_chain:
            self.original = self.owner.__dict__[self.method]
            setattr(self.owner, self.method, self.function)
            self._in_chain = True
        self.active = True

    def count(self) -> int:
        """How many patches of ours are at work on the method; one below another extension's cannot be found, but knows
        that it is there."""
        return len(active_patches(self.owner, self.method)) or int(self.active)

    def keep_out_of_traces(self) -> None:
        """Let torch.compile step over the replacement instead of tracing it, which would take minutes.

        Does nothing until somebody has imported the compiler: the import alone takes seconds.
        """
        if self._is_traced and "torch._dynamo" in sys.modules:
            self._serve = torch.compiler.disable(self._serve)
            self._is_traced = False

    def undo(self) -> None:
        """Take the replacement off; safe to call twice."""
        self.active = False
        if self._in_chain and self.owner.__dict__[self.method] is self.function:
            setattr(self.owner, self.method, self.original)
            self._in_chain = False

"""Put a forward of ours on one of diffusers' modules, and take it off again."""
from __future__ import annotations

import inspect
import types
import weakref
from typing import Any

from torch import nn

from ...guard import HostFunction
from ...runtime.runtime import runtime

# accelerate's offloading hooks put their forward in front and keep the one that they found here.
BEHIND_A_HOOK = "_old_forward"
SLOTS = ("forward", BEHIND_A_HOOK)


class InstanceForward:
    """Stands in for the forward of one module, with the same signature. Holds no reference to the module."""

    # What it does, in words that complete "a fault of OneDiff in ...".
    hook = "the forward"

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.__wrapped__ = type(module).forward
        self.__signature__ = inspect.signature(own_forward(module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()  # its forward is called: it is there
        host = HostFunction(lambda *args, **kwargs: type(module).forward(module, *args, **kwargs))
        if not runtime.guard.suspended:
            try:
                return self.serve(host, module, args, kwargs)
            except Exception as error:
                if id(error) == host.raised:
                    raise
                runtime.guard.note(self.hook, error)
        # Only now is everything gone that ours had computed before it failed.
        runtime.guard.attempt("the fallback to the host", lambda: self.declined(module))
        return host(*args, **kwargs)

    def serve(self, host: HostFunction, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The answer to a call. host: the forward of the module's class, with the same arguments."""
        raise NotImplementedError

    def declined(self, module: Any) -> None:
        """The host's own forward is about to run in our place."""

    def __reduce__(self) -> tuple:
        # A copied or pickled module gets its class's own forward: the copy is not in our care.
        return own_forward, (self._module(),)


def own_forward(module: nn.Module) -> types.MethodType:
    """The forward of a module's class, bound to it."""
    return types.MethodType(type(module).forward, module)


def attached(module: nn.Module) -> Any:
    """The InstanceForward that is on a module; None where there is none."""
    found = (module.__dict__.get(slot) for slot in SLOTS)
    return next((forward for forward in found if isinstance(forward, InstanceForward)), None)


def put_on(module: nn.Module, forward: type[InstanceForward], whose: str) -> None:
    """Put such a forward on a module that has none yet. Raises ValueError if somebody else has replaced the module's
    own; whose: that is, for people."""
    if attached(module) is not None:
        return
    slot = BEHIND_A_HOOK if BEHIND_A_HOOK in module.__dict__ else "forward"
    present = module.__dict__.get(slot)
    if present is not None and getattr(present, "__func__", None) is not type(module).forward:
        raise ValueError(f"somebody else has replaced {whose} forward ({present!r}); undo that first")
    module.__dict__[slot] = forward(module)


def take_off(module: nn.Module) -> None:
    """Undo put_on: the module has its own forward again."""
    for slot in SLOTS:
        if isinstance(module.__dict__.get(slot), InstanceForward):
            if slot == "forward":
                del module.__dict__[slot]
            else:
                module.__dict__[slot] = own_forward(module)

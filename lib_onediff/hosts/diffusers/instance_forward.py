"""Put a forward of ours on one of diffusers' modules, and take it off again."""
from __future__ import annotations

import abc
import inspect
import logging
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...core.guard import HostFunction
from ...runtime.runtime import runtime

log = logging.getLogger("onediff")

# accelerate's offloading hooks put their forward in front and keep the one that they found here.
BEHIND_A_HOOK = "_old_forward"
SLOTS = ("forward", BEHIND_A_HOOK)
# What diffusers' group offloading registers on modules: they move weights around a forward, and change nothing in it.
MOVERS = frozenset({"group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading"})
# Older torch has none; whether somebody traces cannot be asked then.
is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)


class InstanceForward(abc.ABC):
    """Stands in for the forward of one module, with the same signature. Holds no reference to the module.

    torch.compile steps over it instead of tracing it, which would take minutes. Where it may not (fullgraph=True), it
    traces the module's own forward, as if we were not there.
    """

    # What it does, in words that complete "a fault of OneDiff in ...".
    hook = "the forward"

    def __init__(self, module: nn.Module, compiled: Any = None) -> None:
        """compiled: the module's own forward as torch.compile(module.forward) has put it on the module."""
        self._module = weakref.ref(module)
        self.compiled = compiled
        # What diffusers has put around the module's own forward, where we stand in front of that: it would move weights
        # to the GPU for nothing. We stand behind it as well, so that it cannot lose us.
        self.behind: Any = None
        self._is_hosts_turn = False
        self.__wrapped__ = type(module).forward
        self.__signature__ = inspect.signature(own_forward(module))
        # diffusers itself imports the compiler, which takes seconds; where it has not, nobody can have compiled.
        untraced: Any = type(self)._guarded
        self._untraced = torch.compiler.disable(untraced) if "torch._dynamo" in sys.modules else untraced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() and must_be_whole():
            module: Any = self._module()
            return type(module).forward(module, *args, **kwargs)
        return self._untraced(self, *args, **kwargs)

    def _guarded(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()  # its forward is called: it is there
        if self._is_hosts_turn:
            return type(module).forward(module, *args, **kwargs)
        host = type(module).forward if self.behind is None else self._by_hooks
        if only_moves(module) and module.__dict__.get("forward") is not self:
            # They were put around us since. This call has come through them.
            host, self.behind = type(module).forward, module.__dict__["forward"]
            module.__dict__["forward"] = self
        return runtime.guard.serve(
            self.hook, self.serve, host, lambda reason: self.declined(module, reason), module, *args, **kwargs,
        )

    def _by_hooks(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, with the hooks of diffusers around it."""
        self._is_hosts_turn = True
        try:
            return self.behind(*args, **kwargs)
        finally:
            self._is_hosts_turn = False

    @abc.abstractmethod
    def serve(self, host: HostFunction, module: Any, *args: Any, **kwargs: Any) -> Any:
        """The answer to a call. host: the forward of the module's class, which takes the module first."""

    @abc.abstractmethod
    def declined(self, module: Any, reason: str) -> None:
        """The host's own forward is about to run in our place."""

    def __reduce__(self) -> tuple:
        # A copied or pickled module gets its class's own forward: the copy is not in our care.
        return own_forward, (self._module(),)


def must_be_whole() -> bool:
    """Asked of the compiler while it traces: whether it may not leave its graph for a call (fullgraph=True)."""
    try:
        tracer = sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator.current_tx()
        whole = bool(tracer.one_graph or getattr(tracer, "error_on_graph_break", False))
    except Exception:
        log.debug("another torch, or another tracer: this cannot be told", exc_info=True)
        whole = True
    if whole:
        log.warning("OneDiff leaves this call to torch.compile, whose graph must be whole (fullgraph=True).")
    return whole


# torch.compile runs it while it traces, as torch.compiler.assume_constant_result has it do.
vars(must_be_whole)["_dynamo_marked_constant"] = True


def unwrapped(module: Any) -> Any:
    """The module that torch.compile(module) has wrapped; any other as it is."""
    return vars(module).get("_modules", {}).get("_orig_mod", module) if isinstance(module, nn.Module) else module


def own_forward(module: nn.Module) -> types.MethodType:
    """The forward of a module's class, bound to it."""
    return types.MethodType(type(module).forward, module)


def hooked(module: nn.Module) -> Any:
    """What holds the forward around which diffusers' own hooks run; None where there are none."""
    references = getattr(module.__dict__.get("_diffusers_hook"), "_fn_refs", None)
    return references[0] if references else None


def only_moves(module: nn.Module) -> bool:
    """Whether a module has hooks of diffusers, none of which changes what it computes. Where they move weights to the
    disk, what is in main memory meanwhile is none."""
    hooks = {} if hooked(module) is None else module.__dict__["_diffusers_hook"].hooks
    groups = (getattr(hook, "group", None) for hook in hooks.values())
    on_disk = any(getattr(group, "offload_to_disk_path", None) is not None for group in groups)
    return bool(hooks) and MOVERS.issuperset(hooks) and not on_disk


def attached(module: nn.Module) -> Any:
    """The InstanceForward that is on a module; None where there is none."""
    found = (*(module.__dict__.get(slot) for slot in SLOTS), getattr(hooked(module), "forward", None))
    return next((forward for forward in found if isinstance(forward, InstanceForward)), None)


def put_on(module: nn.Module, forward: type[InstanceForward], whose: str) -> None:
    """Put such a forward on a module that has none yet. Raises ValueError if somebody else has replaced the module's
    own; whose: that is, for people."""
    if attached(module) is not None:
        return
    slot = BEHIND_A_HOOK if BEHIND_A_HOOK in module.__dict__ else "forward"
    present = module.__dict__.get(slot)
    if only_moves(module):
        reference, ours = hooked(module), forward(module)
        ours.behind, reference.forward, module.__dict__[slot] = present, ours, ours
        return
    own = getattr(present, "_torchdynamo_orig_callable", present)
    if own is not None and getattr(own, "__func__", None) is not type(module).forward:
        raise ValueError(f"somebody else has replaced {whose} forward ({present!r}); undo that first")
    module.__dict__[slot] = forward(module, None if own is present else present)


def take_off(module: nn.Module) -> None:
    """Undo put_on: the module has its own forward again."""
    reference, ours = hooked(module), attached(module)
    if reference is not None and reference.forward is ours is not None:
        reference.forward = own_forward(module)
        if ours.behind is not None:
            module.__dict__["forward"] = ours.behind
        return
    for slot in SLOTS:
        forward = module.__dict__.get(slot)
        if not isinstance(forward, InstanceForward):
            continue
        if slot == "forward" and forward.compiled is None:
            del module.__dict__[slot]
        else:
            module.__dict__[slot] = forward.compiled or own_forward(module)

"""Put a forward of ours in front of one of diffusers' modules, and take it off again.

The forward of the module's class is replaced once, and finds the module in a weak table. Libraries that put a forward
of their own on the module's instance (accelerate, diffusers' hooks, torch.compile) keep the one that they found there,
a bound method. It is bound anew, to the class's function as it is now.
"""
from __future__ import annotations

import abc
import functools
import inspect
import threading
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from ...core.attempt import HostFunction
from ...core.origins import beneath_ours
from ...core.refusal import Refusal
from ...runtime.runtime import runtime
from ...weights.scan import refuse_replaced
from ..hooks import Replacement, TablePatch, link_of

# accelerate's offloading hooks put their forward in front and keep the one that they found here.
BEHIND_A_HOOK = "_old_forward"
SLOTS = ("forward", BEHIND_A_HOOK)
# Where diffusers keeps its own hooks of a module.
HOOKS = "_diffusers_hook"
# What diffusers' group offloading registers on modules: they move weights around a forward, and change nothing in it.
MOVERS = frozenset({"group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading"})
# Where torch.compile(function) keeps the function.
COMPILED = "_torchdynamo_orig_callable"


class ModuleForward(abc.ABC):
    """Answers the calls of one module in place of its class's forward. Holds no reference to the module.

    kind: the module's class when this was made. follows: the class's function that the references kept by others were
    bound to last (lead_to_ours). Where the class has another one by now, they are bound anew (stay_on).
    """

    # What it does, in words that complete "a fault of OneDiff in ...".
    hook = "the forward"

    def __init__(self, kind: type[nn.Module]) -> None:
        self.kind = kind
        self.follows: Any = None
        # By thread: whether the host's own forward of this module runs now, through hooks that end in the class's.
        self._turn = threading.local()

    def look_up(self, module: Any, original: Callable[..., Any]) -> tuple[Replacement, Callable[..., Any]] | None:
        """What answers a call of this module, and the host's own forward, a function of (module, *args); None where
        that forward of this module is running in this thread already. Mends hooks that call a front; see _beneath."""
        if getattr(self._turn, "is_hosts", False):
            return None
        present = module.__dict__.get("forward")
        if present is None:
            # Nothing stands on the instance, so that _answer would find nothing to stand in front of.
            return functools.partial(self.serve, original), original
        host = original
        if is_front(present) and not hasattr(present.__wrapped__, COMPILED):
            host = functools.partial(self._by_hooks, present.__wrapped__)
        elif HOOKS in module.__dict__:
            host = runtime.guard.attempt("looking at a module's hooks", lambda: self._beneath(module, host)) or host
        return functools.partial(self._answer, original), host

    def _beneath(self, module: nn.Module, host: Callable[..., Any]) -> Callable[..., Any]:
        """The host's own forward, where hooks of diffusers were registered over our front (stand_in_front): has them
        call again what was below the front, and returns that. The given host where no hook calls a front."""
        for reference in hooks_of(module):
            if is_front(reference.forward):
                reference.forward = reference.forward.__wrapped__
                return functools.partial(self._by_hooks, reference.forward)
        return host

    def _by_hooks(self, forward: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward with the hooks of diffusers around it, which take no module."""
        self._turn.is_hosts = True
        try:
            return forward(*args, **kwargs)
        finally:
            self._turn.is_hosts = False

    def _answer(
        self, original: Callable[..., Any], host: HostFunction, module: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        present = module.__dict__.get("forward")
        if present is not None and not is_front(present) and only_moves(module):
            # They were put around us since. This call has come through them.
            stand_in_front(module, "forward")
        return self.serve(original, host, module, *args, **kwargs)

    @abc.abstractmethod
    def serve(
        self, original: Callable[..., Any], host: HostFunction, module: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """The answer to a call. host: the module's own forward, which takes the module first. original: what has the
        host's signature, the function of its class."""

    @classmethod
    @abc.abstractmethod
    def declined(cls, module: Any, reason: str) -> None:
        """The host's own forward is about to run in our place."""


def by_name(
    module: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by their names. original: the class's forward beneath our patch.

    Raises Refusal if somebody has replaced the class's forward, above ours or beneath it, and for arguments that the
    forward does not take, which the host is to refuse. (Signature.bind does the same in a tenth of a millisecond.)
    """
    kind: Any = type(module)
    names = parameters_of(kind, kind.forward, original)
    given = {**dict(zip(names, args)), **kwargs}  # noqa: B905
    if len(given) != len(args) + len(kwargs) or not given.keys() <= set(names):
        raise Refusal("the call has arguments that this network does not take")
    return given


@functools.lru_cache(maxsize=16)
def parameters_of(kind: type, standing: Callable[..., Any], original: Callable[..., Any]) -> tuple[str, ...]:
    """The names of what a class's forward takes besides the module. Raises Refusal where the class's own is neither the
    one that stands there nor the one beneath ours."""
    for function in (beneath_ours(standing), original):
        refuse_replaced(kind, below=function)
    return tuple(inspect.signature(original).parameters)[1:]


# --- on and off -------------------------------------------------------------------------------------------------------


def patch_of(kind: type) -> Any:
    """The TablePatch of a class's forward; None where no module of it was ever attached."""
    return runtime.patches.get((kind, "forward"))


def attached(module: Any) -> Any:
    """The ModuleForward of a module; None where it has none."""
    patch = patch_of(type(module))
    return None if patch is None else patch.get(module)


def put_on(module: nn.Module, forward: type[ModuleForward], whose: str) -> None:
    """Put such a forward in front of a module that has none yet. The module is of one of diffusers' own classes.

    Raises ValueError if somebody else has replaced the module's own forward; whose: that is, for people.
    """
    kind = type(module)
    patch = patch_of(kind)
    if patch is None:
        patch = runtime.patches[kind, "forward"] = TablePatch(
            kind, "forward", runtime.guard, forward.hook, forward.declined
        )
    if patch.get(module) is None:
        refuse_foreign(module, whose)
    patch.put(module, patch.get(module) or forward(kind))
    lead_to_ours(module)
    stay_on(module)


def stay_on(module: nn.Module) -> None:
    """Put our function back into the class of an attached module, if somebody has taken it off since."""
    patch = patch_of(type(module))
    if patch is None or patch.get(module) is None:
        return
    patch.apply()
    for one in patch.objects():
        if patch.get(one).follows is not patch.function:
            lead_to_ours(one)


def take_off(module: nn.Module) -> None:
    """Undo put_on: the module, and what others keep of it, lead to the host's own forward again."""
    patch = patch_of(type(module))
    if patch is None or patch.get(module) is None:
        return
    patch.take(module)
    for holder, name in places_of(module):
        found = holder[name]
        if is_front(found):
            holder[name] = found.__wrapped__
        elif is_bound(found, module):
            holder[name] = types.MethodType(beneath_ours(found.__func__), module)


def refuse_foreign(module: nn.Module, whose: str) -> None:
    """Raise ValueError if the forward that stands on a module's instance is neither its class's nor known hooks'."""
    slot = BEHIND_A_HOOK if BEHIND_A_HOOK in module.__dict__ else "forward"
    present = module.__dict__.get(slot)
    own = getattr(present, COMPILED, present)
    if own is None or only_moves(module):
        return
    standing = beneath_ours(type(module).forward)
    if not is_bound(own, module) and getattr(own, "__func__", None) is not standing:
        raise ValueError(f"somebody else has replaced {whose} forward ({present!r}); undo that first")


def lead_to_ours(module: nn.Module) -> None:
    """Make every kept reference to this module's forward reach our function: bind kept methods (places_of) to it anew,
    and put a front (stand_in_front) before forwards on the instance that only move weights or that torch.compile made.
    """
    patch = patch_of(type(module))
    patch.get(module).follows = patch.function
    for holder, name in places_of(module):
        if is_bound(holder[name], module):
            holder[name] = types.MethodType(patch.function, module)
    state = module.__dict__
    for slot in SLOTS:
        present = state.get(slot)
        is_mover = slot == "forward" and present is not None and only_moves(module)
        if is_front(present) or hasattr(present, COMPILED) or (is_mover and not is_bound(present, module)):
            stand_in_front(module, slot)


def stand_in_front(module: nn.Module, slot: str) -> None:
    """Replace the forward in a slot of a module's instance by a front: a functools.partial of the class's function,
    with the previous forward as its __wrapped__.

    A call then reaches our function first. Where the host's own forward is needed, our function calls __wrapped__.
    diffusers' own hooks install the same kind of partial. The partial refers to nothing of ours but the class's
    function, so a deep copy of the module, which is not attached, runs the host's forward.
    """
    present: Any = module.__dict__[slot]
    below = present.__wrapped__ if is_front(present) else present
    front: Any = functools.partial(patch_of(type(module)).function, module)
    module.__dict__[slot] = functools.update_wrapper(front, below, updated=())


def is_front(forward: Any) -> bool:
    """Whether a forward on a module's instance was made by stand_in_front."""
    return type(forward) is functools.partial and link_of(forward.func) is not None


def is_bound(forward: Any, module: nn.Module) -> bool:
    """Whether a forward is our function, or what stood in the class before it, bound to this very module."""
    if type(forward) is not types.MethodType or forward.__self__ is not module:
        return False
    return beneath_ours(forward.__func__) is beneath_ours(patch_of(type(module)).original)


def places_of(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where others keep a forward of a module, as a dictionary and a key of it."""
    state = module.__dict__
    holders = [(state, slot) for slot in SLOTS]
    holders += [(vars(one), name) for one in hooks_of(module) for name in ("forward", "original_forward")]
    return [(holder, name) for holder, name in holders if holder.get(name) is not None]


# --- diffusers' hooks -------------------------------------------------------------------------------------------------


def hooks_of(module: nn.Module) -> list[Any]:
    """What holds the forwards around which diffusers' own hooks run, the innermost first."""
    return list(getattr(module.__dict__.get(HOOKS), "_fn_refs", None) or ())


def only_moves(module: nn.Module) -> bool:
    """Whether a module has hooks of diffusers, all of which only move weights between memories. False with offloading
    to the disk, where weights have no values in main memory in between."""
    hooks = module.__dict__[HOOKS].hooks if hooks_of(module) else {}
    groups = (getattr(hook, "group", None) for hook in hooks.values())
    on_disk = any(getattr(group, "offload_to_disk_path", None) is not None for group in groups)
    return bool(hooks) and MOVERS.issuperset(hooks) and not on_disk


def unwrapped(module: Any) -> Any:
    """The module that torch.compile(module) has wrapped; any other as it is."""
    return vars(module).get("_modules", {}).get("_orig_mod", module) if isinstance(module, nn.Module) else module

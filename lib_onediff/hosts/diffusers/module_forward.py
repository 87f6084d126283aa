"""Replaces the forward of single modules of diffusers' classes by ours, and undoes that.

The forward of a module's class is replaced once, by a function that looks the module up in a weak table. Libraries that
set a forward of their own on the module's instance (accelerate, diffusers' hooks, torch.compile) keep a bound method of
the forward that they found. Such references are bound again, to the function that the class has now.

"Our function" is the one that is set on the class (hooks.ClassPatch). "The host's own forward" is what the module would
run without OneDiff: the class's forward, with hooks of diffusers around it if there are any.
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
from ...core.refusal import unsupported_inputs
from ...runtime.runtime import runtime
from ...weights.scan import refuse_replaced
from ..hooks import Replacement, TablePatch, link_of

# accelerate's offloading hooks set their own forward on the instance, and keep the one that they found here.
BEHIND_A_HOOK = "_old_forward"
# The attributes of a module's instance in which a forward may be kept.
SLOTS = ("forward", BEHIND_A_HOOK)
# The attribute in which diffusers keeps the hooks of a module.
HOOKS = "_diffusers_hook"
# The names of the hooks of diffusers' group offloading. They move weights before and after a forward, and do not change
# its result.
MOVERS = frozenset({"group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading"})
# The attribute in which the result of torch.compile(function) has the function.
COMPILED = "_torchdynamo_orig_callable"


class ModuleForward(abc.ABC):
    """Serves the calls of one module in place of its class's forward, as a hooks.StandIn. Does not keep the module
    alive. Subclasses implement serve() and declined().

    kind: the module's class when this ModuleForward was created.
    bound_to: the function of the class to which the forwards kept by other code were bound last (rebind_kept_forwards);
        None before the first time. If the class has another function by now, keep_replaced binds these forwards again.
    hook: words for users that complete "a fault of OneDiff in ...".
    """

    hook = "the forward"

    def __init__(self, kind: type[nn.Module]) -> None:
        self.kind = kind
        self.bound_to: Any = None
        # By thread: whether it is running the host's own forward of this module now, with diffusers' hooks around it.
        self._turn = threading.local()

    def look_up(self, module: Any, original: Callable[..., Any]) -> tuple[Replacement, Callable[..., Any]] | None:
        """(our function for this call, the host's own forward for it); see ClassPatch.look_up, which calls this for
        every call of the module's class. None, so that `original` runs, if this thread is inside the host's own forward
        already: then diffusers' hooks are calling the class's forward."""
        if getattr(self._turn, "is_hosts", False):
            return None
        present = module.__dict__.get("forward")
        if present is None:
            # _answer has nothing to do without a forward on the instance.
            return functools.partial(self.serve, original), original
        host = original
        if is_front(present) and not hasattr(present.__wrapped__, COMPILED):
            host = functools.partial(self._by_hooks, present.__wrapped__)
        elif HOOKS in module.__dict__:
            host = runtime.guard.attempt("looking at a module's hooks", lambda: self._below_front(module, host)) or host
        return functools.partial(self._answer, original), host

    def _below_front(self, module: nn.Module, host: Callable[..., Any]) -> Callable[..., Any]:
        """The host's own forward of a module with diffusers' hooks, some of which were registered above our front
        (add_front) and call the front. Changes the first such hook to call the forward below the front, and returns
        that forward, callable as host(module, ...). Returns `host` if no hook calls a front."""
        for reference in hooks_of(module):
            if is_front(reference.forward):
                reference.forward = reference.forward.__wrapped__
                return functools.partial(self._by_hooks, reference.forward)
        return host

    def _by_hooks(self, forward: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The output of the host's own forward of a module, with diffusers' hooks around it. While it runs, look_up
        returns None in this thread. forward: already bound to the module, which is not passed to it."""
        self._turn.is_hosts = True
        try:
            return forward(*args, **kwargs)
        finally:
            self._turn.is_hosts = False

    def _answer(
        self, original: Callable[..., Any], host: HostFunction, module: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """The output of serve() for a module with a forward on its instance. Before that, adds a front (add_front) if
        diffusers' offloading hooks were set around our function, so that the next call reaches us before them."""
        present = module.__dict__.get("forward")
        if present is not None and not is_front(present) and only_moves(module):
            # Hooks of diffusers were set around our function later, and this call came through them. With a front, the
            # next one reaches us first.
            add_front(module, "forward")
        return self.serve(original, host, module, *args, **kwargs)

    @abc.abstractmethod
    def serve(
        self, original: Callable[..., Any], host: HostFunction, module: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """What the host's own forward would return for this call of the module, computed by our forward or by `host`.

        original: the forward of the class below our patch; only its signature is used.
        host: host(module, *args, **kwargs) runs the host's own forward.
        args, kwargs: the caller's.
        """

    @classmethod
    @abc.abstractmethod
    def declined(cls, module: Any, reason: str) -> None:
        """Called when the guard runs the host's own forward in place of serve(), because OneDiff is suspended or
        serve() has failed; notes that for the status. Not called if serve() itself passes the call to the host.
        reason: for the user."""


def arguments_by_name(
    module: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call of a module's forward by parameter name, without defaults. original: the class's forward
    below our patch. args, kwargs: the call's arguments by position, without the module, and by keyword.

    Raises Refusal if other code has replaced the class's forward, above or below our patch; also for arguments that the
    forward does not take, so that the host raises its own error. Signature.bind would do the same, but takes a tenth of
    a millisecond.
    """
    kind: Any = type(module)
    names = parameters_of(kind, kind.forward, original)
    given = {**dict(zip(names, args)), **kwargs}  # noqa: B905
    if len(given) != len(args) + len(kwargs) or not given.keys() <= set(names):
        raise unsupported_inputs("arguments that the model does not take")
    return given


@functools.lru_cache(maxsize=16)
def parameters_of(kind: type, present: Callable[..., Any], original: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the parameters of a class's forward (original), in order and without self. Cached by all three
    arguments.

    present: the function that the class has now. original: the forward below our patch. Raises Refusal if other code
    has replaced the class's forward, so that one of these two is not the class's own.
    """
    for function in (beneath_ours(present), original):
        refuse_replaced(kind, below=function)
    return tuple(inspect.signature(original).parameters)[1:]


# --- replacing and restoring ------------------------------------------------------------------------------------------


def patch_of(kind: type) -> Any:
    """The TablePatch of a class's forward; None if replace_forward was never called for a module of this class. It
    remains when all its modules are restored."""
    return runtime.patches.get((kind, "forward"))


def attached(module: Any) -> Any:
    """The ModuleForward that serves a module's calls; None if the module is not attached (replace_forward)."""
    patch = patch_of(type(module))
    return None if patch is None else patch.get(module)


def replace_forward(module: nn.Module, forward: type[ModuleForward], whose: str) -> None:
    """Attach a module of one of diffusers' classes: a new ModuleForward serves its calls from now on. A module that is
    attached already keeps its ModuleForward.

    forward: a subclass of ModuleForward, which is called with the module's class. whose: the module's name in the error
        message, such as "this UNet's".

    Raises ValueError if other code has replaced the module's own forward.
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
    rebind_kept_forwards(module)
    keep_replaced(module)


def keep_replaced(module: nn.Module) -> None:
    """Set our function on the class of an attached module again if other code has removed it. The function may be a new
    one then: the forwards that other code keeps of all attached modules of the class are bound to the new one
    (rebind_kept_forwards). Does nothing for a module that is not attached. Called before each sampling of a pipeline.
    """
    patch = patch_of(type(module))
    if patch is None or patch.get(module) is None:
        return
    patch.apply()
    for one in patch.objects():
        if patch.get(one).bound_to is not patch.function:
            rebind_kept_forwards(one)


def restore_forward(module: nn.Module) -> None:
    """Undo replace_forward: the module, and the forwards that other code keeps of it, run the host's own forward again.
    Does nothing for a module that is not attached."""
    patch = patch_of(type(module))
    if patch is None or patch.get(module) is None:
        return
    patch.take(module)
    for holder, name in kept_forwards(module):
        found = holder[name]
        if is_front(found):
            holder[name] = found.__wrapped__
        elif is_bound(found, module):
            holder[name] = types.MethodType(beneath_ours(found.__func__), module)


def refuse_foreign(module: nn.Module, whose: str) -> None:
    """Raise ValueError if the forward on a module's instance may compute something else than its class's forward.
    Accepted are no forward on the instance, the class's own, and the class's own inside of accelerate's hooks, of
    diffusers' offloading hooks, or of torch.compile. whose: see replace_forward."""
    if BEHIND_A_HOOK in module.__dict__:
        present = module.__dict__[BEHIND_A_HOOK]
    elif only_moves(module):
        present, *around = (hook.forward for hook in hooks_of(module))
        outermost: Any = module.__dict__.get("forward")
        around.append(outermost.__wrapped__ if is_front(outermost) else outermost)
        foreign = next((one for one in around if not is_of_hooks(module, one)), None)
        if foreign is not None:
            raise ValueError(f"other code has replaced {whose} forward ({foreign!r}): undo that before you compile it")
    else:
        present = module.__dict__.get("forward")
    own = getattr(present, COMPILED, present)
    if own is None:
        return
    standing = beneath_ours(type(module).forward)
    if not is_bound(own, module) and getattr(own, "__func__", None) is not standing:
        raise ValueError(f"other code has replaced {whose} forward ({present!r}): undo that before you compile it")


def rebind_kept_forwards(module: nn.Module) -> None:
    """Make every forward of this module that other code keeps (kept_forwards) call our function: rebinds bound methods
    to it, and adds a front (add_front) to forwards on the instance that torch.compile or offloading hooks have set.
    The module must be attached."""
    patch = patch_of(type(module))
    patch.get(module).bound_to = patch.function
    for holder, name in kept_forwards(module):
        if is_bound(holder[name], module):
            holder[name] = types.MethodType(patch.function, module)
    state = module.__dict__
    for slot in SLOTS:
        present = state.get(slot)
        is_mover = slot == "forward" and present is not None and only_moves(module)
        if is_front(present) or hasattr(present, COMPILED) or (is_mover and not is_bound(present, module)):
            add_front(module, slot)


def add_front(module: nn.Module, slot: str) -> None:
    """Replace the forward in the attribute `slot` of a module's instance by a front: a functools.partial of our
    function, with the previous forward as its __wrapped__. A front that is there already is renewed.

    A call then reaches our function before hooks or compiled code. Where the host's own forward is needed, our function
    calls __wrapped__. diffusers' own hooks install the same kind of partial. The only object of ours that a front
    refers to is the class's function. So a deep copy of the module, which is not attached, runs the host's forward.
    """
    present: Any = module.__dict__[slot]
    below = present.__wrapped__ if is_front(present) else present
    front: Any = functools.partial(patch_of(type(module)).function, module)
    module.__dict__[slot] = functools.update_wrapper(front, below, updated=())


def is_front(forward: Any) -> bool:
    """Whether this object is a front of ours; see add_front. None is not one."""
    return type(forward) is functools.partial and link_of(forward.func) is not None


def is_bound(forward: Any, module: nn.Module) -> bool:
    """Whether a forward is a method bound to this very module, and its function is ours or the class's own forward.
    The module's class must have a patch (patch_of)."""
    if type(forward) is not types.MethodType or forward.__self__ is not module:
        return False
    return beneath_ours(forward.__func__) is beneath_ours(patch_of(type(module)).original)


def kept_forwards(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """The places where other code may keep a forward of a module, each as (dictionary, key): the module's own
    attributes in SLOTS, and the attributes forward and original_forward of each of hooks_of. Places without a forward
    are left out."""
    state = module.__dict__
    holders = [(state, slot) for slot in SLOTS]
    holders += [(vars(one), name) for one in hooks_of(module) for name in ("forward", "original_forward")]
    return [(holder, name) for holder, name in holders if holder.get(name) is not None]


# --- diffusers' hooks -------------------------------------------------------------------------------------------------


def hooks_of(module: nn.Module) -> list[Any]:
    """The objects in which diffusers keeps the forwards that a module's hooks wrap (HookRegistry._fn_refs), one for
    each hook, the innermost hook's first; [] without hooks."""
    return list(getattr(module.__dict__.get(HOOKS), "_fn_refs", None) or ())


def is_of_hooks(module: nn.Module, forward: Any) -> bool:
    """Whether a forward is one that diffusers' HookRegistry has set on this module, which must have one: a partial of a
    function that is defined in the registry's file."""
    file = type(module.__dict__[HOOKS]).__module__
    return type(forward) is functools.partial and getattr(forward.func, "__module__", "") == file


def only_moves(module: nn.Module) -> bool:
    """Whether a module has hooks of diffusers, and all of them only move weights between GPU and main memory (group
    offloading). False without hooks, and for offloading to disk, where weights are in no memory between calls."""
    hooks = module.__dict__[HOOKS].hooks if hooks_of(module) else {}
    groups = (getattr(hook, "group", None) for hook in hooks.values())
    on_disk = any(getattr(group, "offload_to_disk_path", None) is not None for group in groups)
    return bool(hooks) and MOVERS.issuperset(hooks) and not on_disk


def unwrapped(module: Any) -> Any:
    """The module inside of the result of torch.compile(module); any other object, also None, is returned as it is."""
    return vars(module).get("_modules", {}).get("_orig_mod", module) if isinstance(module, nn.Module) else module

"""Patches that replace methods of a host's classes by our functions, which serve the calls of networks and VAEs or pass
them to the host.

A patch of a class is below any forward that another extension sets on an instance (ControlNet, a tiled decoder), serves
every network (the refiner too), and leaves no attribute on the host's objects.
"""
from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..core.attempt import Attempt
from ..core.call import Call, PromptRows
from ..core.guard import Guard
from ..core.origins import author, origin, package
from ..core.refusal import unsupported_inputs, unsupported_model
from ..core.weak_dictionary import WeakDictionary
from ..runtime.runtime import runtime
from ..weights.scan import HostTraits, own_method, refuse_replaced
from .tracing import is_compiler_here, is_compiling, must_be_whole

# A function that serves in a method's place: replacement(original, self, *args, **kwargs) returns the method's result.
Replacement = Callable[..., Any]
# declined(self, reason) is called when the guard runs the original instead of the replacement: OneDiff is suspended, or
# has failed. It is not called if the replacement itself passes a call to the original.
Declined = Callable[[Any, str], object]
# The reason, for users, why the host decodes.
OTHER_VAE = "OneDiff does not support this kind of VAE"


def note_host(unet: Any, reason: str) -> None:
    """Count a call of this UNet that the host computes without OneDiff, with the reason for the user. The default for
    a ClassPatch's `declined`."""
    runtime.note_host(reason, unet)


class Link:
    """One function of ours that replaces a method of a class, as a link in the chain of functions that extensions and
    OneDiff have put on top of each other.

    original: the function that ours has replaced, and to which ours passes calls on.
    active: whether our function may serve. If not, it passes every call on to original.
    is_in_chain: whether calls of the class may reach our function, directly or through a function that an extension has
        put above it.
    function: our function, as it is set on the class. link_of recognises it by its closure, which contains this link.
    untraced: does the work of `function`. Once the compiler is imported (ClassPatch.keep_out_of_traces), a wrapper that
        torch.compile does not trace.
    """

    def __init__(self, patch: ClassPatch, original: Callable[..., Any]) -> None:
        """patch: its look_up() decides who serves a call. original: see Link."""
        self.original = original
        self.active = True
        self.is_in_chain = True
        link = self

        def untraced(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            found = patch.look_up(module, original) if link.active else None
            if found is None:
                return original(module, *args, **kwargs)
            ours, host = found
            declined = functools.partial(patch.declined, module)
            return patch.guarded(patch.hook, ours, host, declined, module, *args, **kwargs)

        @functools.wraps(original)
        def patched(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() and must_be_whole():
                return original(self, *args, **kwargs)
            return link.untraced(self, *args, **kwargs)

        self.untraced: Callable[..., Any] = untraced
        self.function = patched


class ClassPatch:
    """Replaces one method of a class for all of its objects, from apply() to undo().

    If the replacement fails, the guard runs the original. If another extension patches the method after us, our
    function stays below its patch, and after undo() passes all calls on.

    owner, method: the class, and the name of the method.
    replacement: see Replacement. declined: see Declined.
    guard: catches faults of the replacement. guarded: the guard's serve(), through which every call goes.
    hook: words for the method, for users ("the UNet's forward").
    """

    def __init__(
        self, owner: type, method: str, replacement: Replacement, guard: Guard, hook: str,
        declined: Declined = note_host,
    ) -> None:
        self.owner = owner
        self.method = method
        self.hook = hook
        self.declined = declined
        self.guarded = guard.serve
        self._replacement = replacement
        self._link: Link | None = None
        # Reentrant, because a finalizer may call apply or undo while this thread is inside of either.
        self._lock = threading.RLock()
        self._is_traced = True

    @property
    def active(self) -> bool:
        """Whether our function may serve calls now: after apply(), and before undo()."""
        return self._link is not None and self._link.active

    @property
    def original(self) -> Callable[..., Any]:
        """The function that ours has replaced; before the first apply(), the one that it would replace."""
        link = self._link
        found: Callable[..., Any] = self.owner.__dict__[self.method] if link is None else link.original
        return found

    @property
    def function(self) -> Any:
        """Our function; None before the first apply()."""
        return None if self._link is None else self._link.function

    def look_up(self, module: Any, original: Callable[..., Any]) -> tuple[Replacement, Callable[..., Any]] | None:
        """(ours, host) for the present call of this object: our function that serves it, and the host's function, which
        ours may call, and which runs if ours fails. None: the call goes to `original` directly. Every call runs this.

        original: the function that ours has replaced on the class. An override must not raise, because it runs outside
        of the guard.
        """
        return self._replacement, original

    def apply(self) -> None:
        """Put our function in place of the class's present method, and make our function active. A function of ours
        that is in the chain already stays where it is: another extension's patch above it is taken to call it. If other
        code has put the class's own method back, our function is set again. Safe to call twice."""
        with self._lock:
            top = self._remove_inactive_links()
            link = self._link
            if link is not None and top is not link.function and self._is_own_method(top):
                # Another extension has put the class's own method back.
                link.is_in_chain = False
            if link is None or not link.is_in_chain:
                link = self._link_above(top)
                self._link = link
                setattr(self.owner, self.method, link.function)
            link.active = True
            link.is_in_chain = True

    def _link_above(self, top: Callable[..., Any]) -> Link:
        """A link whose original is the function `top`; the caller sets the link's function on the class. If the last
        link has the same original, this is the last link, so that bound methods of its function, which other code may
        have kept, serve again. Otherwise it is a new link, and the last link becomes inactive."""
        last = self._link
        if last is not None and last.original is top:
            return last
        if last is not None:
            last.active = False
        link = Link(self, top)
        if not self._is_traced:
            link.untraced = stepped_over(link.untraced)
        return link

    def undo(self) -> None:
        """Make our function inactive, and give the class its earlier method back. Below another extension's patch our
        function stays, and passes all calls on. Safe to call twice."""
        with self._lock:
            if self._link is not None:
                self._link.active = False
                self._remove_inactive_links()

    def _remove_inactive_links(self) -> Callable[..., Any]:
        """Remove our inactive functions from the top of the chain, and mark their links as not in the chain. Returns
        the function that is the class's method then. An inactive function below another extension's patch stays."""
        found: Callable[..., Any] = self.owner.__dict__[self.method]
        while (link := link_of(found)) is not None and not link.active:
            link.is_in_chain = False
            found = link.original
            setattr(self.owner, self.method, found)
        return found

    def _is_own_method(self, function: Any) -> bool:
        """Whether a function is the method from the class's own definition, by its name and Python package. If the
        class has this function after apply(), other code has removed ours."""
        is_named_so = getattr(function, "__qualname__", "") == f"{self.owner.__qualname__}.{self.method}"
        return is_named_so and package(origin(function)) == package(self.owner.__module__)

    def keep_out_of_traces(self) -> None:
        """Make torch.compile skip our code from now on, because tracing it would take minutes. The host's method is
        still traced where our function passes a call on to it. Does nothing until the compiler is imported, so callers
        repeat this before each sampling."""
        if self._is_traced and is_compiler_here():
            self._is_traced = False
            # Nothing that our function calls is compiled. The host's function, which the link calls, still is.
            self.guarded = torch.compiler.disable(self.guarded)
            if self._link is not None:
                self._link.untraced = stepped_over(self._link.untraced)


def stepped_over(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, wrapped so that torch.compile does not trace it. Functions that it calls are still traced. Imports
    the compiler."""
    found: Callable[..., Any] = torch.compiler.disable(function, recursive=False)
    return found


def link_of(function: Any) -> Link | None:
    """The Link whose function this is; None if the function, or any other object, is not a Link's. The Link is found in
    the function's closure and not in an attribute, because decorators, and hooks of accelerate and diffusers, copy a
    function's attributes to their own functions."""
    code = getattr(function, "__code__", None)
    if code is None or "link" not in code.co_freevars:
        return None
    link = function.__closure__[code.co_freevars.index("link")].cell_contents
    return link if isinstance(link, Link) and link.function is function else None


class StandIn(Protocol):
    """Decides who serves the calls of one object in the table of a TablePatch. Must not keep that object alive."""

    def look_up(self, one: Any, original: Callable[..., Any]) -> tuple[Replacement, Callable[..., Any]] | None:
        """(ours, host) for the present call of the object `one`; None: the call goes to `original`. As
        ClassPatch.look_up."""


class TablePatch(ClassPatch):
    """Replaces one method of a class for the objects of the class that were put() into a weak table, each with a
    StandIn. All other objects run the host's method.

    The objects have no attribute of ours. So a copy of an object, however it was made, is not in the table. When the
    last object in the table is gone, the patch is removed from the class.
    """

    def __init__(self, owner: type, method: str, guard: Guard, hook: str, declined: Declined = note_host) -> None:
        super().__init__(owner, method, never_called, guard, hook, declined)
        self._table: WeakDictionary[Any, StandIn] = WeakDictionary()

    def get(self, one: Any) -> Any:
        """The StandIn of an object; None if the object is not in the table."""
        try:
            return self._table.get(one)
        except TypeError:  # not hashable, or without weak references: such objects are never in the table
            return None

    def objects(self) -> list[Any]:
        """The objects in the table that are alive."""
        return self._table.keys()

    def put(self, one: Any, stand_in: StandIn) -> None:
        """Serve the calls of this object by a StandIn from now on, in place of an earlier one. Puts our function on the
        class if it is not there. Raises TypeError if the object does not support weak references."""
        with self._lock:
            is_new = self.get(one) is None
            self._table[one] = stand_in
            self.apply()
            self.keep_out_of_traces()
        if is_new:
            weakref.finalize(one, self._undo_if_unused).atexit = False

    def take(self, one: Any) -> None:
        """Undo put(): the object runs the host's method again. If no object is left in the table, our function is
        removed from the class. Safe to call twice."""
        with self._lock:
            if self.get(one) is not None:
                del self._table[one]
            self._undo_if_unused()

    def look_up(self, module: Any, original: Callable[..., Any]) -> tuple[Replacement, Callable[..., Any]] | None:
        """What the object's StandIn returns; None for an object that is not in the table, so that the host's method
        runs. See ClassPatch.look_up."""
        try:
            stand_in = self._table.get(module)
        except TypeError:  # as in get
            return None
        return None if stand_in is None else stand_in.look_up(module, original)

    def _undo_if_unused(self) -> None:
        """Remove the patch from the class if no object is left in the table."""
        with self._lock:
            if not self._table.keys():
                self.undo()


def never_called(*given: Any, **named: Any) -> Any:
    """Raises LookupError. A TablePatch has to give ClassPatch some replacement, and gives this one. Its look_up never
    returns this one, because each object's StandIn has a replacement of its own."""
    raise LookupError("called for an object that has no StandIn")


class ForwardPatches:
    """Replaces the forwards of several classes by one function of ours, for all objects of these classes, from serve()
    to stop().

    classes: at least one class. replacement, hook, declined: see ClassPatch.
    patches: the ClassPatch of each class.
    """

    def __init__(
        self, classes: Iterable[type], replacement: Replacement, hook: str, declined: Declined = note_host
    ) -> None:
        self.patches = [
            ClassPatch(kind, "forward", replacement, runtime.guard, hook, declined) for kind in classes
        ]

    @property
    def active(self) -> bool:
        """Whether the forwards are replaced now: after serve(), and before stop()."""
        return self.patches[0].active

    def are_for(self, module: Any) -> bool:
        """Whether a module's class is one of those whose forward this replaces. False for a derived class, and for
        None."""
        return any(type(module) is patch.owner for patch in self.patches)

    def refuse_derived(self, module: Any) -> None:
        """Raise Refusal unless the module's class is one of those whose forward this replaces. A call that has reached
        our forward may be of a derived class, whose other methods may compute something else."""
        if not self.are_for(module):
            kind = type(module)
            raise unsupported_model(
                f"its class {kind.__module__}.{kind.__qualname__} is derived from a known one, and may compute "
                "something else"
            )

    def serve(self) -> None:
        """Replace the forwards. Safe to call twice."""
        for patch in self.patches:
            patch.apply()

    def stop(self) -> None:
        """Undo serve(). Safe to call twice."""
        for patch in self.patches:
            patch.undo()

    def end_sampling(self) -> None:
        """Called when a generation's last sampling has ended. Does nothing here; see UNetHooks."""


class AnnouncedSampling(NamedTuple):
    """A sampling that a host has announced, and whose end it has not announced yet.

    generation: the number of the sampling's generation (Guard.generation).
    is_second_pass: whether the sampling is the second pass of hires fix.
    calls_before: the number of UNet calls that OneDiff had counted when the sampling was announced.
    """

    generation: int
    is_second_pass: bool
    calls_before: int


class UNetHooks(ForwardPatches):
    """Replaces UNets' forwards. If no call of a sampling has reached our forward, shows the user the reason: another
    extension may call the UNet in a way that bypasses OneDiff."""

    def __init__(self, classes: Iterable[type], forward: Replacement, why_bypassed: Callable[[], str]) -> None:
        """classes: the UNets' classes. forward: serves a call; see Replacement. why_bypassed: returns why a sampling's
        calls did not reach our forward, in one line for the user."""
        super().__init__(classes, forward, "the UNet's forward")
        self._why_bypassed = why_bypassed
        self._announced: AnnouncedSampling | None = None

    def stop(self) -> None:
        """Undo serve(), and forget the announced sampling, so that nothing is said about its calls. Safe to call twice.
        """
        super().stop()
        self._announced = None

    def begin_sampling(self, p: Any, unet: nn.Module | None) -> None:
        """Note that the generation p, the WebUI's processing object, begins a sampling with this UNet, and that the
        same generation's previous sampling has ended (end_sampling); the sampling of another generation is forgotten.
        The second pass of hires fix may be announced twice: the second time, nothing is noted. Also sets our forwards
        on their classes again if other code has removed them.

        unet: None if OneDiff does not serve the network. Then the previous sampling has ended, and no new one is noted.
        """
        for patch in self.patches:
            patch.keep_out_of_traces()
            if patch.active:
                # Another extension may have removed it.
                patch.apply()
        is_second_pass = bool(getattr(p, "is_hr_pass", False))
        generation = runtime.guard.generation
        announced = self._announced
        # A generation that has failed does not announce its end, so its last sampling is ignored.
        if announced is not None and announced.generation != generation:
            announced = None
        # Forge announces the second pass of hires fix twice.
        if announced is not None and announced.is_second_pass and is_second_pass:
            return
        self._announced = announced
        self.end_sampling()
        if unet is not None:
            self._announced = AnnouncedSampling(generation, is_second_pass, runtime.call_stats.total)

    def end_sampling(self) -> None:
        """Called when the announced sampling has ended. If no UNet call reached OneDiff in it, gives the user the
        reason (why_bypassed), unless the user has interrupted the image or OneDiff is suspended. Does nothing if no
        sampling is announced."""
        announced = self._announced
        self._announced = None
        if announced is None or announced.calls_before != runtime.call_stats.total:
            return
        if not runtime.guard.suspended and not was_interrupted():
            runtime.note_host(self._why_bypassed())


def was_interrupted() -> bool:
    """Whether the user has interrupted or skipped the image that the WebUI makes now, or made last."""
    from modules.shared import state

    return bool(state.interrupted or state.skipped or getattr(state, "stopping_generation", False))


def serve_call(
    unet: nn.Module, read: Callable[[], Call], host: Callable[[], Tensor], prompt_rows: Callable[[], PromptRows],
    host_traits: HostTraits | None = None,
) -> Tensor:
    """The output of a UNet's call: the runtime's, or the host's if the call cannot be read. Raises only exceptions of
    the host.

    read: converts the host's arguments to a Call, or raises Refusal. Any other exception of read() counts as a fault of
        ours, except if the host's forward fails too: then the host's exception is raised, and no fault is noted.
    host: runs the host's own forward with these arguments.
    prompt_rows: returns the prompt's rows, or raises Refusal if they are unknown. Called only if a step policy needs
        them.
    host_traits: the UNet's, if the runtime may not have adopted the UNet yet; None if it has.
    """
    unread: Attempt[Call] | None = None
    try:
        call = read()
    except Exception as error:
        unread = Attempt.of(error)
    if unread is None:
        return runtime.run(unet, call, host, host_traits, prompt_rows)
    return runtime.unread(unet, unread, host)


class VaeHooks(ForwardPatches):
    """Replaces the forwards of decoders and encoders of VAEs whose classes are like ldm's.

    classes: their Decoder and Encoder.
    host_traits: how the host treats modules and weights of all these decoders and encoders.
    check: check(module) raises Refusal if the adapter knows a reason why the host must decode or encode.
    upcasts: returns whether the host computes attention scores in float32 for inputs of any dtype.
    """

    def __init__(
        self, classes: Iterable[type], host_traits: HostTraits,
        check: Callable[[nn.Module], object] = lambda decoder: None, upcasts: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(
            classes, self._forward, "the VAE's forward", lambda decoder, reason: runtime.vae.note_host(reason)
        )
        self._host_traits = host_traits
        self._check = check
        self._upcasts = upcasts

    def stop(self) -> None:
        """Undo serve(), and make the runtime forget every decoder and encoder. Safe to call twice."""
        super().stop()
        runtime.vae.release_all()

    def begin_run(self, decoder: Any) -> None:
        """Called when a sampling begins whose image will most likely be decoded by this decoder. Adopts the decoder, so
        that OneDiff decodes. If another extension has set a forward on it, also gives the user that reason why the host
        may decode. A decoder of a class that OneDiff does not serve, or None if the VAE has no decoder, is not adopted,
        and the user gets the reason OTHER_VAE."""
        if not self.are_for(decoder):
            return runtime.vae.note_host(OTHER_VAE, is_decode=False)
        runtime.vae.adopt(decoder, host_traits=self._host_traits)
        replaced = own_method(decoder, "forward")
        if replaced is not None:
            # It may decode without calling our forward. If it does call ours, that notes the decode.
            reason = f"another extension decodes the image itself, perhaps in tiles ({author(replaced)})"
            runtime.vae.note_host(reason, is_decode=False)

    def _forward(self, original: Callable[..., Tensor], decoder: nn.Module, z: Tensor, **kwargs: Any) -> Tensor:
        """The output of a decoder or encoder (decoder), ours or the host's; replaces Decoder.forward(self, z, **kwargs)
        and Encoder.forward(self, x, **kwargs). original: the host's forward. kwargs: refused if there are any, so that
        the host computes."""

        def check() -> None:
            self.refuse_derived(decoder)
            refuse_replaced(type(decoder), below=original)
            if kwargs:
                names = ", ".join(sorted(kwargs))
                raise unsupported_inputs(f"unknown arguments of the VAE ({names})")
            self._check(decoder)

        runtime.vae.adopt(decoder, host_traits=self._host_traits)
        return runtime.vae.decode(decoder, z, lambda: original(decoder, z, **kwargs), self._upcasts(), check)

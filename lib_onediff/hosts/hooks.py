"""Hooks on a host's classes: ours in place of a forward, and a UNet's or a VAE's call by it, served or handed back.

A class-level patch lies below whatever another extension sets on an instance (ControlNet, a decoder in tiles), serves
every network (the refiner's too), and leaves no attribute on the host's objects.
"""
from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.call import Call, PromptRows
from ..core.guard import Guard
from ..core.origins import author
from ..core.refusal import Refusal
from ..runtime.runtime import runtime
from ..weights.scan import HostTraits, own_method, refuse_replaced

# replacement(original, self, *args, **kwargs) -> what the method returns
Replacement = Callable[..., Any]
# declined(self, reason): the original runs in place of the replacement.
Declined = Callable[[Any, str], object]
OTHER_VAE = "OneDiff serves no VAE of this kind"


def note_host(unet: Any, reason: str) -> None:
    runtime.note_host(reason, unet)


class ClassPatch:
    """One replaced method. Where somebody has patched over ours since, ours stays in the chain but does nothing.

    An error of the replacement's is the guard's affair: the original runs. hook: what the method is, in words for the
    user.
    """

    def __init__(
        self, owner: type, method: str, replacement: Replacement, guard: Guard, hook: str,
        declined: Declined = note_host,
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

    def keep_out_of_traces(self) -> None:
        """Let torch.compile step over the replacement instead of tracing it, which would take minutes.

        Does nothing until somebody has imported the compiler: the import alone takes seconds.
        """
        if self._is_traced and "torch._dynamo" in sys.modules:
            self._serve = torch.compiler.disable(self._serve)
            self._is_traced = False


class ForwardPatches:
    """The same replacement for the forwards of several classes. hook, declined: see ClassPatch."""

    def __init__(
        self, classes: Iterable[type], replacement: Replacement, hook: str, declined: Declined = note_host
    ) -> None:
        self.patches = [
            ClassPatch(kind, "forward", replacement, runtime.guard, hook, declined) for kind in classes
        ]

    @property
    def active(self) -> bool:
        return self.patches[0].active

    def serve(self) -> None:
        for patch in self.patches:
            patch.apply()

    def stop(self) -> None:
        for patch in self.patches:
            patch.undo()

    def end_sampling(self) -> None:
        """The last sampling of a generation is over."""


class UNetHooks(ForwardPatches):
    """Our forward in UNets' calls, and a look at every sampling for calls that went past it."""

    def __init__(self, classes: Iterable[type], forward: Replacement, why_bypassed: Callable[[], str]) -> None:
        """why_bypassed: who made an image without our forward, in one line for the user."""
        super().__init__(classes, forward, "the UNet's forward")
        self._why_bypassed = why_bypassed
        # The sampling that the host has announced: its generation, whether it is a second pass, and how many calls
        # there had been before it.
        self._announced: tuple[int, bool, int] | None = None

    def stop(self) -> None:
        super().stop()
        self._announced = None

    def begin_sampling(self, p: Any, unet: nn.Module | None) -> None:
        """The generation p begins a sampling with this UNet; None where it is of a kind that we do not serve."""
        for patch in self.patches:
            patch.keep_out_of_traces()
        second_pass, generation = bool(getattr(p, "is_hr_pass", False)), runtime.guard.generation
        # No host tells the end of a generation that has failed, and of its last sampling nothing is known.
        if self._announced and self._announced[0] != generation:
            self._announced = None
        # Forge announces the second pass of hires fix twice.
        if not (self._announced and self._announced[1] and second_pass):
            self.end_sampling()
            self._announced = None if unet is None else (generation, second_pass, runtime.call_stats.total)

    def end_sampling(self) -> None:
        """Say so if the sampling that was announced went past us."""
        announced, self._announced = self._announced, None
        bypassed = announced is not None and announced[2] == runtime.call_stats.total and not runtime.guard.suspended
        if bypassed and not was_interrupted():
            runtime.note_host(self._why_bypassed())


def was_interrupted() -> bool:
    from modules.shared import state

    return bool(state.interrupted or state.skipped or getattr(state, "stopping_generation", False))


def serve_call(
    unet: nn.Module, read: Callable[[], Call], host: Callable[[], Tensor], prompt_rows: Callable[[], PromptRows],
    host_traits: HostTraits | None = None,
) -> Tensor:
    """The output of a UNet's call. host: the host's own forward of it. read: the call as ours; prompt_rows: which of
    its rows are the prompt's. Both raise Refusal with the reason where only the host knows. host_traits: see
    Runtime.run."""
    try:
        call = read()
    except Refusal as refusal:
        runtime.note_host(str(refusal), unet)
        return runtime.pressure.run_host(host)
    return runtime.run(unet, call, host, host_traits, prompt_rows)


class VaeHooks(ForwardPatches):
    """Our VAE in hosts whose VAE is ldm's (A1111 with ldm and sgm, Forge): patches of these classes of decoders and
    encoders.

    check: raises Refusal where a decoder's call is not ours, from what the adapter knows of its host.
    upcasts: whether the host computes attention scores in float32 whatever the type of its inputs.
    """

    def __init__(
        self, classes: Iterable[type], host_traits: HostTraits,
        check: Callable[[nn.Module], object] = lambda decoder: None, upcasts: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(
            classes, self._forward, "the VAE's forward", lambda decoder, reason: runtime.vae.note_host(reason)
        )
        self._host_traits, self._check, self._upcasts = host_traits, check, upcasts

    def stop(self) -> None:
        super().stop()
        runtime.vae.release_all()

    def begin_run(self, decoder: Any) -> None:
        """A sampling begins, whose image will most likely be decoded by this one."""
        if not any(isinstance(decoder, patch.owner) for patch in self.patches):
            return runtime.vae.note_host(OTHER_VAE, is_decode=False)
        runtime.vae.adopt(decoder, host_traits=self._host_traits)
        replaced = own_method(decoder, "forward")
        if replaced is not None:
            # It may decode without ours, and nobody would tell why. If it asks ours, that is told then.
            reason = f"the decoder has a forward of its own, set by {author(replaced)} (tiles?)"
            runtime.vae.note_host(reason, is_decode=False)

    def _forward(self, original: Callable[..., Tensor], decoder: nn.Module, z: Tensor, **kwargs: Any) -> Tensor:
        """Stands in for Decoder.forward(self, z, **kwargs), and for Encoder's."""

        def check() -> None:
            refuse_replaced(type(decoder), beneath_ours=original)
            if kwargs:
                names = ", ".join(sorted(kwargs))
                raise Refusal(f"the VAE is called with arguments that OneDiff does not know ({names})")
            self._check(decoder)

        runtime.vae.adopt(decoder, host_traits=self._host_traits)
        return runtime.vae.decode(decoder, z, lambda: original(decoder, z, **kwargs), self._upcasts(), check)

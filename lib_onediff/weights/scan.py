"""Notice that somebody else has changed how a network computes, and what a host adapter knows of its host's ways.

What a host applies to a layer's weights at each use, a LoRA that is not merged above all, comes in a form of ours: a
plain LoRA is computed beside the layer, by two small products. Anything else is applied to a copy of the weight, once
for every change of it.
"""
from __future__ import annotations

import types
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..core.origins import OURS, author, beneath_ours, origin, package, underlying
from ..core.refusal import Refusal
from .watch import edit_counts, layout_of

Change = Callable[[Tensor], Tensor]
# Where the Forge family keeps what it adds to a layer's weights at every call: a LoRA that is not merged. Its adapter
# reads these at every call.
APPLIED_AT_CALL = ("weight_function", "bias_function", "forge_online_loras")
FORWARDS = ("forward", "_forward")
# The functions of torch that layers of a UNet call.
FUNCTIONS = (
    "linear", "conv2d", "group_norm", "layer_norm", "rms_norm", "silu", "gelu", "scaled_dot_product_attention",
    "interpolate", "pad", "softmax",
)
# What torch runs of a layer's class besides forward; the last where somebody else's forward calls torch's.
CALLED_BY_TORCH = ("_conv_forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__")


@dataclass(frozen=True)
class LowRankUpdate:
    """What a LoRA adds to a weight: scale * up @ down. up: (out, rank). down: (rank, in), or (rank, in, height, width)
    of a convolution."""

    up: Tensor
    down: Tensor
    scale: float


@dataclass(frozen=True)
class WeightFunctions:
    """What a host applies to the parameters of one layer, in the type that is computed in.

    updates: LoRAs of its weight, where that is all. weight, bias: functions of a tensor that they may write to; None
    where nothing is applied, or updates say it. lasting: whether the functions do the same until their parts change.
    """

    updates: tuple[LowRankUpdate, ...] = ()
    weight: Change | None = None
    bias: Change | None = None
    lasting: bool = True


@dataclass(frozen=True)
class Casts:
    """How a host casts what its layers hold, at each use.

    to: the type to which it casts the parameters of these layers, for inputs of a type; None where it computes with
    them as they are stored. norms: whether it casts those of norms too.
    """

    to: Callable[[Sequence[nn.Module], torch.dtype], torch.dtype | None]
    norms: bool = True


@dataclass
class Parts:
    """What a host's functions consist of, as one look finds them. It keeps them alive: drop it after the call.

    places: in the list of layers, of those to which anything is applied. facts: plain data, such as a LoRA's strength.
    objects: what is the same as long as it is the same object. tensors: what is computed with.
    """

    places: list[int] = field(default_factory=list)
    facts: list[object] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def mark(self) -> list[object]:
        """Equal for the same parts, as long as those that it was made of are alive: else something other may have
        their identities. Of tensors, what is in them is not among it."""
        tensors = self.tensors
        where = [list(map(look, tensors)) for look in (Tensor.data_ptr, layout_of, Tensor.stride)]
        return [self.places, self.facts, list(map(id, self.objects)), where, edit_counts(tensors)]


class FunctionReader(Protocol):
    """Reads what one host's layers have."""

    def could_apply(self, layers: Sequence[nn.Module]) -> bool:
        """Whether anything could come to be applied to these layers without a change of the module tree."""

    def parts(self, layers: Sequence[nn.Module]) -> Parts:
        """Of what is applied to these layers now: asked at every call, about 5 microseconds a layer with a LoRA. Raises
        Refusal where the host has to compute them."""

    def of(self, layer: nn.Module) -> WeightFunctions:
        """What is applied to a layer, at one of those places. Raises Refusal where the host has to compute it."""


@dataclass(frozen=True)
class HostTraits:
    """What a host adapter knows of its host's ways with a UNet.

    trusted: Python modules whose class-level patches change nothing that the adapter does not see to.
    inert: whether the forwards set on a module's instance (unet, module) do now just what its class's would.
    sync_lora: brings the parameters of these layers up to date, where the host does that lazily in each one's forward.
    wanted_lora: what sync_lora brings them up to; equal as long as nothing has to be done.
    brought: whether every call brings what is set on the instance of the module at a path (unet, path) as patches.
    yardstick: the host's forward, with what it only approximates (8-bit attention) computed exactly, to compare with.
    functions: reads what the host applies to its layers' weights at each use; without it, that is the host's.
    casts: how the host casts its layers' weights at each use; None where it never does.
    written: attributes that the host's forwards write on their modules, and that nothing computes with.
    placed: attributes that say where a host keeps a module's weights; they change nothing that is computed.
    movers: Python modules whose hooks on a network's modules move weights, and change nothing that is computed.
    make_room: has the host take so many bytes of a UNet's weights off the GPU, or more; how many it has taken.
    """

    trusted: Collection[str] = ()
    inert: Callable[[nn.Module, nn.Module], bool] = lambda unet, module: False
    sync_lora: Callable[[Iterable[nn.Module]], None] | None = None
    wanted_lora: Callable[[], Hashable] | None = None
    brought: Callable[[nn.Module, str], bool] = lambda unet, path: False
    yardstick: Callable[[Callable[[], Tensor]], Callable[[], Tensor]] = lambda host: host
    functions: FunctionReader | None = None
    casts: Casts | None = None
    written: frozenset[str] = frozenset()
    placed: frozenset[str] = frozenset()
    movers: Collection[str] = ()
    make_room: Callable[[nn.Module, int], int] = lambda unet, size: 0


def refuse_foreign_code(network: nn.Module, host_traits: HostTraits) -> None:
    """Raise Refusal for the first thing that makes a module below a network compute something other than its class
    says. Takes some milliseconds.

    That is: a method set on an instance, a hook, a LoRA that is not merged, dropout at work, or a class one of whose
    methods was replaced by code from a Python module that is neither the class's own nor in host_traits.trusted. The
    network itself is the caller's to judge: its hooks run around any forward.
    """
    run: dict[type, tuple[str, ...]] = {}
    processors: dict[type, tuple[str, ...]] = {}
    for name, module in network.named_modules():
        state, kind = module.__dict__, type(module)
        if "processor" in state:
            processors[type(state["processor"])] = ("__call__",)
        if module is network:
            continue
        if kind not in run:
            run[kind] = methods_of(kind)
        for method in run[kind]:
            own = own_method(module, method) if method in state else None
            if own is not None and not (
                method in FORWARDS and (host_traits.inert(network, module) or host_traits.brought(network, name))
            ):
                raise Refusal(f"{name} has a {method} of its own, set by {author(own)}")
        for hook in (*state["_forward_hooks"].values(), *state["_forward_pre_hooks"].values()):
            if origin(hook) not in host_traits.movers:
                raise Refusal(f"{name} has a forward hook, set by {author(hook)}")
        if host_traits.functions is None and any(state.get(name) for name in APPLIED_AT_CALL):
            raise Refusal(
                "a LoRA is applied at every call, not merged (fp16 LoRA in Diffusion in Low Bits, or low VRAM)"
            )
        if isinstance(module, nn.Dropout) and module.training and module.p > 0:
            raise Refusal(f"{name} drops values (the UNet is in training mode)")
    for kind, methods in (processors | run).items():
        for method in methods:
            refuse_replaced(kind, method, host_traits.trusted)
    refuse_global_hooks()
    # torch has rms_norm from 2.4 on.
    for name in (name for name in FUNCTIONS if hasattr(nn.functional, name)):
        function = getattr(nn.functional, name)
        if package(origin(function)) not in ("torch", "builtins") and is_foreign(function, host_traits.trusted):
            raise Refusal(f"torch.nn.functional.{name} was replaced by {author(function)}")


def refuse_replaced(
    kind: type, method: str = "forward", trusted: Collection[str] = (), below: object = None
) -> None:
    """Raise Refusal if somebody who is not trusted has replaced a class's own method. below: the function that a hook
    of ours hands its calls to; by default, the one that stands in the class, beneath ours."""
    owner = next((base for base in kind.__mro__ if method in base.__dict__), None)
    function = below or (owner and beneath_ours(owner.__dict__[method]))
    # A class's own package may decorate it: diffusers.utils around a method of diffusers.models.
    if owner and package(origin(function)) != package(owner.__module__) and is_foreign(function, trusted):
        raise Refusal(f"{kind.__name__}.{method} was replaced by {author(function)}")


def refuse_global_hooks() -> None:
    """Raise Refusal where a hook runs around every module's forward. Microseconds."""
    everywhere = nn.modules.module
    for hook in (*everywhere._global_forward_hooks.values(), *everywhere._global_forward_pre_hooks.values()):
        raise Refusal(f"a forward hook is set on all modules, by {author(hook)}")


def is_foreign(function: object, trusted: Collection[str]) -> bool:
    """Whether a function is neither ours nor of those Python modules that an adapter sees to."""
    return origin(function) not in trusted and package(origin(function)) != OURS


def methods_of(kind: type) -> tuple[str, ...]:
    """What is run of a class when a module of it is called: the forwards, and the methods that they call by name."""
    called: set[str] = set()
    for name in FORWARDS:
        forward: Any = getattr(kind, name, None)
        while hasattr(forward, "__wrapped__"):
            forward = forward.__wrapped__
        code: types.CodeType | None = getattr(underlying(forward), "__code__", None)
        for other in () if code is None else code.co_names:
            member = getattr(kind, other, None)
            if callable(member) and not isinstance(member, type):
                called.add(other)
    return (*FORWARDS, *sorted(called - {*FORWARDS, *CALLED_BY_TORCH}), *CALLED_BY_TORCH)


def own_method(module: nn.Module, name: str) -> object | None:
    """What is set on the instance in place of a method of its class; None where that is nothing else than the class's
    method, bound (who undoes a patch may leave that behind), or what that was before it was wrapped."""
    own = module.__dict__.get(name)
    if getattr(own, "__self__", module) is not module:
        return own
    function, below = getattr(own, "__func__", None), getattr(type(module), name, None)
    while below is not None:
        if function is below:
            return None
        below = getattr(below, "__wrapped__", None)
    return own

"""Notice that somebody else has changed how a UNet computes."""
from __future__ import annotations

import types
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..core.origins import origin, package, underlying
from .offload import RestoreFirst
from .weight_functions import Casts, FunctionReader

# Where the Forge family keeps what it adds to a layer's weights at every call: a LoRA that is not merged.
APPLIED_AT_CALL = ("weight_function", "bias_function", "forge_online_loras")
# Attributes of modules that are read at every call by whoever knows what they mean.
LOOKED_AT_BY_OTHERS = frozenset(APPLIED_AT_CALL)
FORWARDS = ("forward", "_forward")
# The functions of torch that layers of a UNet call.
FUNCTIONS = (
    "linear", "conv2d", "group_norm", "layer_norm", "silu", "gelu", "scaled_dot_product_attention", "interpolate",
    "pad", "softmax",
)
OURS = __name__.partition(".")[0]
# What torch runs of a layer's class besides forward; the last where somebody else's forward calls torch's.
CALLED_BY_TORCH = ("_conv_forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__")


class Scan(NamedTuple):
    """What a look through a module tree has found. patched: the first thing that makes a module compute something other
    than its class says, in one line; None where there is none."""

    patched: str | None


def never(unet: nn.Module, module: nn.Module) -> bool:
    return False


def keeps_none(unet: nn.Module) -> str:
    return ""


def as_it_is(host: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return host


@dataclass(frozen=True)
class HostTraits:
    """What a host adapter knows of its host's ways with a UNet.

    trusted: Python modules whose class-level patches change nothing that the adapter does not see to.
    inert: whether the forwards set on a module's instance (unet, module) do now just what its class's would.
    sync_lora: brings the parameters of these layers up to date, where the host does that lazily in each one's forward.
    wanted_lora: what sync_lora brings them up to; equal as long as nothing has to be done.
    brought: whether every call brings what is set on a module's instance (unet, module) as patches.
    yardstick: the host's forward, with what it only approximates (8-bit attention) computed exactly, to compare with.
    functions: reads what the host applies to its layers' weights at each use; without it, that is the host's.
    casts: how the host casts its layers' weights at each use; None where it never does.
    keeps_weights: why nobody else can move weights of a UNet off the GPU, in one line; "" where the host bears it.
    """

    trusted: Collection[str] = ()
    inert: Callable[[nn.Module, nn.Module], bool] = never
    sync_lora: Callable[[Iterable[nn.Module]], None] | None = None
    wanted_lora: Callable[[], Hashable] | None = None
    brought: Callable[[nn.Module, nn.Module], bool] = never
    yardstick: Callable[[Callable[[], Tensor]], Callable[[], Tensor]] = as_it_is
    functions: FunctionReader | None = None
    casts: Casts | None = None
    keeps_weights: Callable[[nn.Module], str] = keeps_none


def scan(unet: nn.Module, host_traits: HostTraits = HostTraits()) -> Scan:
    """Look through every module below unet, in some milliseconds: for a method set on an instance, a hook, a LoRA that
    is not merged, dropout at work, or a class one of whose methods was replaced by code from a Python module that is
    neither the class's own nor in host_traits.trusted. unet itself is the caller's to judge: its hooks run around any
    forward.
    """
    classes: set[type] = set()
    processors: set[type] = set()
    methods: dict[type, tuple[str, ...]] = {}
    for name, module in unet.named_modules():
        state, kind = module.__dict__, type(module)
        if kind not in methods:
            methods[kind] = methods_of(kind)
        if "processor" in state:
            processors.add(type(state["processor"]))
        if module is unet:
            continue
        classes.add(kind)
        replaced = next((
            (method, own) for method in methods[kind] if method in state
            and (own := own_method(module, method)) is not None
        ), None)
        if replaced is not None and not (
            replaced[0] in FORWARDS and (host_traits.inert(unet, module) or host_traits.brought(unet, module))
        ):
            return Scan(f"{name} has a {replaced[0]} of its own, set by {origin(replaced[1])}")
        if state["_forward_hooks"] or state["_forward_pre_hooks"] and not is_ours(state["_forward_pre_hooks"]):
            return Scan(f"{name} has a forward hook")
        if host_traits.functions is None and any(state.get(name) for name in APPLIED_AT_CALL):
            return Scan("a LoRA is applied at every call, not merged (fp16 LoRA in Diffusion in Low Bits, or low VRAM)")
        if isinstance(module, nn.Dropout) and module.training and module.p > 0:
            return Scan(f"{name} drops values (the UNet is in training mode)")
    patched = replaced_methods(classes, host_traits.trusted)
    if patched is None:
        patched = replaced_method(processors, ("__call__",), host_traits.trusted)
    return Scan(patched or replaced_function(host_traits.trusted))


def methods_of(kind: type) -> tuple[str, ...]:
    """What is run of a class when a module of it is called: the forwards, and the methods that they call by name."""
    called = {
        name for forward in FORWARDS for code in (code_of(getattr(kind, forward, None)),) if code is not None
        for name in code.co_names if callable(getattr(kind, name, None)) and not isinstance(getattr(kind, name), type)
    }
    return (*FORWARDS, *sorted(called - {*FORWARDS, *CALLED_BY_TORCH}), *CALLED_BY_TORCH)


def code_of(function: Any) -> types.CodeType | None:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return getattr(underlying(function), "__code__", None)


def replaced_methods(classes: Collection[type], trusted: Collection[str]) -> str | None:
    """As replaced_method, of all that is run of these classes."""
    found = (replaced_method((kind,), methods_of(kind), trusted) for kind in classes)
    return next((one for one in found if one is not None), None)


def replaced_function(trusted: Collection[str]) -> str | None:
    """What stands in the place of a function of torch's that layers call, or runs in every module, in one line."""
    everywhere = nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return "a forward hook is set on all modules"
    for name in FUNCTIONS:
        source = origin(getattr(nn.functional, name))
        if package(source) not in ("torch", "builtins") and source not in trusted and package(source) != OURS:
            return f"torch.nn.functional.{name} was replaced by {source}"
    return None


def is_ours(hooks: Mapping[int, object]) -> bool:
    """Whether these hooks only bring back what we have offloaded."""
    return all(isinstance(hook, RestoreFirst) for hook in hooks.values())


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


def replaced_method(classes: Collection[type], methods: Collection[str], trusted: Collection[str]) -> str | None:
    for kind in classes:
        for method in methods:
            source = replaced_by(kind, method)
            if source is not None and source not in trusted and package(source) != OURS:
                return f"{kind.__name__}.{method} was replaced by {source}"
    return None


def replaced_by(kind: type, method: str = "forward") -> str | None:
    """The Python module whose code stands in the place of a class's own method; None where the class's own stands."""
    owner = next((base for base in kind.__mro__ if method in base.__dict__), None)
    if owner is None:
        return None
    source = origin(owner.__dict__[method])
    # A class's own package may decorate it: diffusers.utils around a method of diffusers.models.
    return None if package(source) == package(owner.__module__) else source

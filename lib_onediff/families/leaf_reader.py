"""Describes a network's layers (core.leaves) for a layout, and makes sure that no parameter of the network is
overlooked.
"""
from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..core.leaves import AdaptiveNorm, Convolution, FreeParameter, FusedLinear, GroupNorm, LayerNorm, Linear, RMSNorm
from ..core.origins import author, is_lora, layer_within, package
from ..core.refusal import Refusal, unsupported_lora, unsupported_model

# The padding modes of convolutions that our forward computes, each with the value of Convolution.circular.
PADDING_MODES = {"zeros": False, "circular": True}


class HostLayers:
    """The hosts' own layer classes, such as Forge's Linear, that LeafReader accepts in place of torch's layer of the
    same name. They compute the same, from parameters of the same names, but may cast to float32 and back. A Linear and
    an RMSNorm may have any base class; every other one is derived from torch's class. Each host's package registers its
    classes with take() when it is imported."""

    def __init__(self) -> None:
        self._classes: set[tuple[str, str]] = set()

    def take(self, package: str, *classes: str) -> None:
        """Register classes. package: the first part of their Python modules' names, such as "backend". classes: their
        qualified names within the Python module, such as "ForgeOperations.Linear"."""
        self._classes.update((package, name) for name in classes)

    def has(self, kind: type) -> bool:
        """Whether this class is registered, by its package and its qualified name."""
        return (package(kind.__module__), kind.__qualname__) in self._classes


HOST_LAYERS = HostLayers()


class LeafReader:
    """Reads the modules of one network into the descriptions that its layout consists of.

    A layout reader calls a method for each module: linear(), rms_norm() and so on return its description, or raise
    Refusal if the module computes something else. They also claim the module's parameters, which means that our forward
    uses them; at the end, refuse_unclaimed() raises Refusal if a parameter was never claimed.

    network: the module at the top. All modules that are read must be inside of it, and paths are relative to it.
    reads_loras: whether a LoRA of peft around a layer is accepted, because the host's LoraReader adds it to each call.
        The description then has the sizes of the layer inside, and the path of the LoRA's module. False: Refusal.
    """

    def __init__(self, network: nn.Module, reads_loras: bool = False) -> None:
        self._reads_loras = reads_loras
        self._packages = ("torch", package(type(network).__module__))
        self._paths: dict[nn.Module, str] = {module: name for name, module in network.named_modules()}
        # Names of the parameters that were neither claimed nor marked as unused yet.
        self._unclaimed = {name for name, _ in network.named_parameters()}

    def path(self, module: nn.Module) -> str:
        """The module's dotted name within the network; "" for the network itself. KeyError for a module outside."""
        return self._paths[module]

    def kind(self, module: object) -> str:
        """The name of a module's class, such as "ResBlock", by which layout readers tell modules apart.

        For a class that is neither torch's nor from the network's package, or only claims to be (is_genuine): the full
        name with the Python module, which equals no name that a reader expects. An extension may define a class of the
        same name.
        """
        kind = type(module)
        known = package(kind.__module__) in self._packages and is_genuine(kind)
        return kind.__name__ if known else f"{kind.__module__}.{kind.__qualname__}"

    def require(self, module: Any, **wanted: Any) -> None:
        """Raise Refusal unless the module's attributes of these names equal these values: require(block,
        upsample=None). The Refusal names the first attribute that differs, and its value. Raises AttributeError if an
        attribute is missing."""
        odd = next((name for name, value in wanted.items() if getattr(module, name) != value), None)
        if odd is not None:
            raise self.unknown(module, f"its {odd} is {getattr(module, odd)!s:.40}".partition("\n")[0])

    def expect(self, kind: str, *modules: Any) -> None:
        """Raise Refusal unless the class of every one of these modules has this name, and is torch's or from the
        network's package (see kind())."""
        for module in modules:
            if self.kind(module) != kind:
                raise self.unknown(module, f"expected {kind}")

    def refuse_unclaimed(self) -> None:
        """Raise Refusal if the network has parameters that were neither claimed nor marked as unused, such as an
        adapter's: our forward would ignore them. A layout reader calls this last. The Refusal has their number and one
        of their names."""
        if self._unclaimed:
            example = min(self._unclaimed)
            raise unsupported_model(f"it has unknown parameters ({len(self._unclaimed)}), such as {example}")

    def mark_unused(self, module: nn.Module | None) -> None:
        """Accept all parameters of a module, and of modules within it, though our forward does not read them: either
        each call brings the functions that use them, or nothing uses them now. Does nothing for None, and for a module
        outside the network."""
        if module is not None and module in self._paths:
            self._unclaimed -= {f"{self.path(module)}.{name}" for name, _ in module.named_parameters()}

    def layers(
        self, readers: Mapping[str, Callable[[Any, LeafReader], Any]], modules: Iterable[Any]
    ) -> tuple[Any, ...]:
        """The descriptions of modules, in order, without None and nn.Identity, which compute nothing.

        readers: for each kind() that may occur, the function that returns the description, given the module and this
            LeafReader. Raises Refusal for any other kind, and what these functions raise.
        """
        found = []
        for module in modules:
            if module is not None and not isinstance(module, nn.Identity):
                reader = readers.get(self.kind(module))
                if reader is None:
                    raise self.unknown(module)
                found.append(reader(module, self))
        return tuple(found)

    def linear(self, module: Any) -> Linear:
        """The description of an nn.Linear, of a host's linear layer, or of a 1x1 nn.Conv2d with stride 1 and without
        padding, which is a linear layer over the channels. Claims weight and bias. Raises Refusal for any other module,
        and for what _claim() and _within() refuse."""
        layer = self._within(module)
        if isinstance(layer, nn.Conv2d):
            pointwise = self.convolution(module)
            if (pointwise.kernel, pointwise.stride, pointwise.padding) != (1, 1, 0):
                raise self.unknown(module, "expected a 1x1 convolution")
            return Linear(pointwise.path, pointwise.in_channels, pointwise.out_channels)
        if not is_linear(layer):
            raise self.unknown(layer, "expected a linear layer")
        self._claim(module)
        out_features, in_features = layer.weight.shape
        return Linear(self.path(module), in_features, out_features)

    def convolution(self, module: Any) -> Convolution:
        """The description of an nn.Conv2d, or of a host's class derived from it. Claims its weight and its bias, if it
        has one: the description is the same in either case.

        Raises Refusal unless kernel, stride and padding are equal in height and width, there is no dilation and one
        group, and the padding is a number of pixels, filled with zeros or from the opposite edge (PADDING_MODES); also
        for what _claim() and _within() refuse.
        """
        layer = self._within(module)
        if not isinstance(layer, nn.Conv2d):
            raise self.unknown(layer, "expected a 2D convolution")
        kernel = layer.kernel_size
        stride = layer.stride
        padding = layer.padding
        plain = layer.dilation == (1, 1) and layer.groups == 1 and layer.padding_mode in PADDING_MODES
        if not plain or isinstance(padding, str) or any(a != b for a, b in (kernel, stride, padding)):
            raise self.unknown(layer, f"padding mode {layer.padding_mode}, dilation {layer.dilation}")
        self._claim(module)
        return Convolution(
            self.path(module), layer.in_channels, layer.out_channels, kernel[0], stride[0], padding[0],
            # Without padding, no pixel beyond the edge is read, so the padding mode makes no difference.
            circular=padding[0] > 0 and PADDING_MODES[layer.padding_mode],
        )

    def group_norm(self, module: Any) -> GroupNorm:
        """The description of an nn.GroupNorm, whose weight and bias it claims. Raises Refusal for any other module, for
        one without weight and bias, and for what _claim() refuses."""
        if not isinstance(module, nn.GroupNorm) or not module.affine:
            raise self.unknown(module, "expected a group norm with weight and bias")
        self._claim(module)
        return GroupNorm(self.path(module), module.num_channels, module.num_groups, module.eps)

    def layer_norm(self, module: Any) -> LayerNorm:
        """The description of an nn.LayerNorm, which is taken to run over the last dimension. Claims its weight and its
        bias, if it has one. Raises Refusal for any other module, for one without weight, and for what _claim() refuses.
        """
        if not isinstance(module, nn.LayerNorm) or not module.elementwise_affine:
            raise self.unknown(module, "expected a layer norm with weight")
        self._claim(module)
        return LayerNorm(self.path(module), module.normalized_shape[-1], module.eps)

    def rms_norm(self, module: Any) -> RMSNorm:
        """The description of torch's RMSNorm, or of a host's class of that name, whose weight it claims. A module whose
        attribute `add` is True multiplies by 1 + weight.

        Raises Refusal for any other module, for one without weight or with a bias, for one without an epsilon unless
        has_float32s_epsilon(), and for what _claim() refuses.
        """
        plus_one = getattr(module, "add", False)
        has_bias = getattr(module, "bias", None) is not None
        is_known = module.weight is not None and not has_bias and plus_one in (True, False)
        if type(module).__name__ != "RMSNorm" or not is_known:
            raise self.unknown(module, "expected an RMS norm with a weight and no bias")
        self._claim(module)
        if module.eps is None and not has_float32s_epsilon():
            raise self.unknown(module, "it has no epsilon, and this PyTorch uses a different one for each dtype")
        eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
        return RMSNorm(self.path(module), len(module.weight), eps, bool(plus_one))

    def adaptive_norm(self, module: Any, width: int) -> AdaptiveNorm:
        """The description of a layer norm over the last dimension, of size `width`, that has neither weight nor bias,
        because a modulation follows it. There is nothing to claim. Raises Refusal for a norm with weight or bias, or of
        another size; the caller has checked the module's class."""
        if module.weight is not None or module.bias is not None or tuple(module.normalized_shape) != (width,):
            raise self.unknown(module, "expected a layer norm without weight")
        return AdaptiveNorm(width, float(module.eps))

    def parameter(self, module: Any, name: str) -> FreeParameter:
        """The description of a parameter that belongs to no layer, such as a table or a learned token.

        module: the one to which the parameter belongs. name: of the parameter, as the module's attribute. Claims this
        parameter alone. Raises Refusal if the module has no parameter of this name, or None in its place.
        """
        tensor = module._parameters.get(name)
        if tensor is None:
            raise self.unknown(module, f"it has no {name}")
        path = ".".join(filter(None, (self.path(module), name)))
        self._unclaimed.discard(path)
        return FreeParameter(path, tuple(tensor.shape))

    def shifted_norm(self, module: Any, weight: str) -> RMSNorm:
        """The description of an RMS norm that multiplies by 1 + weight in float32 (RMSNorm.as_stored). Claims its
        parameter.

        weight: the name of the parameter in the module. Raises Refusal if there is no such parameter. The module's
        class is not checked: the caller makes sure that it computes such a norm.
        """
        parameter = self.parameter(module, weight)
        return RMSNorm(parameter.path, parameter.shape[0], module.eps, plus_one=True, as_stored=True)

    def fused(self, name: str, *modules: Any) -> FusedLinear:
        """The description of linear layers over the same input, which our forward computes as one product. Claims the
        layers' parameters.

        name: of the group, by which the forward looks up the fused weight; any text that no other group or module of
            the network has. Raises Refusal if the inputs differ in width, and for modules that linear() refuses.
        """
        members = tuple(self.linear(module) for module in modules)
        if len({member.in_features for member in members}) != 1:
            raise unsupported_model(f"the layers of {name} take inputs of different widths")
        return FusedLinear(name, members)

    def _claim(self, module: nn.Module) -> None:
        """Claim a layer's weight and bias, and the scale by which a host quantizes its input (input_scale), so that
        refuse_unclaimed() accepts them. If the module is a LoRA around the layer, its matrices are accepted, too. Any
        other parameter of the layer stays unclaimed.

        Raises Refusal if the layer has modules inside, a weight that is no parameter or is stored scaled
        (scale_weight), no weight, or a forward that is neither torch's nor a host's (HOST_LAYERS); also for what
        _within() refuses.
        """
        layer = self._within(module)
        if next(layer.children(), None) is not None:
            raise self.unknown(layer, "it has layers of its own inside")
        if not computes_as_torch(type(layer)):
            raise self.unknown(layer, "it does not compute as PyTorch's layer does")
        if not isinstance(getattr(layer, "weight", None), nn.Parameter):
            raise self.unknown(layer, "it has no weight")
        if getattr(layer, "scale_weight", None) is not None:
            raise self.unknown(layer, "its weight is stored scaled")
        # input_scale: the scale by which a host quantizes the input of a layer in 8 bits. Ours computes its own.
        for name in ("weight", "bias", "input_scale"):
            if getattr(layer, name, None) is not None:
                self._unclaimed.discard(f"{self.path(layer)}.{name}")
        if layer is not module:
            for part in module.children():
                self.mark_unused(None if part is layer else part)

    def _within(self, module: Any) -> Any:
        """The layer inside if the module is a LoRA of peft, else the module itself. Raises Refusal for any other class
        of peft, and for a LoRA if this reader was made without reads_loras."""
        if not type(module).__module__.startswith("peft."):
            return module
        if not (self._reads_loras and is_lora(type(module))):
            kind = type(module)
            where = self._paths.get(module, "?")
            raise unsupported_lora(f"{where} is a {kind.__module__}.{kind.__qualname__}, not a plain LoRA")
        return layer_within(module)

    def unknown(self, module: Any, why: str = "") -> Refusal:
        """A Refusal, for the caller to raise, that names a module and says why it cannot be read.

        why: what is unusual about the module. "" says that its class is unknown: the reason then names the extension
            that has put a module of its own class in this place or around it, if there is one.
        """
        where = self._paths.get(module, "?") if isinstance(module, nn.Module) else "?"
        replaced = None if why else self._foreign_at(where)
        if replaced is not None:
            place, kind = replaced
            # An extension's Python module may be missing from sys.modules, but a function of it knows its file.
            owner = author(vars(kind).get("forward", kind))
            return Refusal(f"{owner} has replaced {place} by its own {kind.__qualname__}")
        kind = type(module)
        detail = f" ({why})" if why else ""
        return unsupported_model(f"its part {where} is a {kind.__module__}.{kind.__qualname__}{detail}")

    def _foreign_at(self, path: str) -> tuple[str, type] | None:
        """The outermost module on this path whose class comes from another package than torch and the network's: the
        module's path, and its class. None if there is no such module. Unlike kind(), this trusts the package that a
        class names (see is_genuine). path: a dotted name within the network."""
        kinds = {known: type(module) for module, known in self._paths.items()}
        names = path.split(".")
        for length in range(1, len(names) + 1):
            place = ".".join(names[:length])
            kind = kinds.get(place)
            if kind is not None and package(kind.__module__) not in self._packages:
                return place, kind
        return None


@functools.cache
def has_float32s_epsilon() -> bool:
    """Whether an RMS norm with eps=None uses float32's epsilon for float16 and bfloat16 too, in this version of torch.
    Other versions use each dtype's own epsilon, which a description cannot hold. Measured once, by a small norm on the
    CPU."""
    small = torch.full((1,), 2.0**-4, dtype=torch.bfloat16, device="cpu")
    return torch.equal(functional.rms_norm(small, (1,)), torch.ones_like(small))


def computes_as_torch(kind: type) -> bool:
    """Whether a layer class's forward, its own or the one that it inherits, was defined by torch or by a class in
    HOST_LAYERS. False for an extension's class that overrides it."""
    owner = next(base for base in kind.__mro__ if "forward" in base.__dict__)
    return HOST_LAYERS.has(owner) or (package(owner.__module__) == "torch" and is_genuine(owner))


def is_linear(layer: Any) -> bool:
    """Whether a layer is an nn.Linear, or a host's Linear (HOST_LAYERS), which may not be derived from nn.Linear."""
    kind = type(layer)
    return isinstance(layer, nn.Linear) or (kind.__name__ == "Linear" and HOST_LAYERS.has(kind))


def is_class(kind: type, module: str, *names: str) -> bool:
    """Whether the Python module of this full name defines this class under one of these names: the same object, not
    another class with the same name."""
    return kind.__module__ == module and kind.__qualname__ in names and is_genuine(kind)


def is_genuine(kind: type) -> bool:
    """Whether the Python module from which a class says it comes has this class under this name. False for a class that
    only claims the name, as some extensions' do, and for one that is defined inside a function."""
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind

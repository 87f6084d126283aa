"""Describes a network's leaf modules (core.leaves), and makes sure that no parameter of the network is overlooked."""
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
from ..core.refusal import Refusal

# The padding modes of convolutions that our forward computes, each with the value of Convolution.circular.
PADDING_MODES = {"zeros": False, "circular": True}


class HostLayers:
    """Layer classes of hosts that LeafReader accepts in place of torch's layer of the same name: they compute the same,
    from parameters of the same names, and may only cast to float32 and back. Each host's package registers its own with
    take() when it is imported."""

    def __init__(self) -> None:
        self._classes: set[tuple[str, str]] = set()

    def take(self, package: str, *classes: str) -> None:
        """Register classes. package: the host's, such as "backend". classes: their qualified names."""
        self._classes.update((package, name) for name in classes)

    def has(self, kind: type) -> bool:
        """Whether a class is registered."""
        return (package(kind.__module__), kind.__qualname__) in self._classes


HOST_LAYERS = HostLayers()


class LeafReader:
    """Reads a network's modules into the descriptions that its layout consists of.

    A reader of a network calls a method for each module: linear(), rms_norm() and so on return its description, or
    raise Refusal if the module computes something else. They also claim the module's parameters; at the end,
    refuse_unclaimed() raises Refusal if any parameter is left, since our forward would ignore it.

    network: the module at the top. All modules that are read must be inside of it, and paths are relative to it.
    reads_loras: whether a LoRA of peft around a layer is accepted, because the host's LoraReader adds it to each call.
        The description is that of the layer inside, under the path of the LoRA's module. False: Refusal.
    """

    def __init__(self, network: nn.Module, reads_loras: bool = False) -> None:
        self._reads_loras = reads_loras
        self._packages = ("torch", package(type(network).__module__))
        self._paths: dict[nn.Module, str] = {module: name for name, module in network.named_modules()}
        self._unclaimed = {name for name, _ in network.named_parameters()}

    def path(self, module: nn.Module) -> str:
        """The module's dotted name within the network."""
        return self._paths[module]

    def kind(self, module: object) -> str:
        """The name of a module's class if the class is torch's or from the network's package, such as "ResBlock".

        Otherwise the full name with its Python module, which matches no name that a reader expects: an extension may
        define a class of the same name.
        """
        kind = type(module)
        known = package(kind.__module__) in self._packages and is_genuine(kind)
        return kind.__name__ if known else f"{kind.__module__}.{kind.__qualname__}"

    def require(self, module: Any, **wanted: Any) -> None:
        """Raise Refusal unless the module has these values in its attributes of these names: require(block,
        upsample=None). The Refusal names the first attribute that differs, and its value."""
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
        """Raise Refusal if the network has parameters that no description covers, such as an adapter's: our forward
        would ignore them. A reader calls this last. The Refusal has their number and one of them as an example."""
        if self._unclaimed:
            example = min(self._unclaimed)
            raise Refusal(f"{len(self._unclaimed)} parameters that OneDiff does not know, such as {example}")

    def leave(self, module: nn.Module | None) -> None:
        """Mark a module's parameters as known but unused by our forward: each call brings the functions that use them,
        or nothing uses them now. None, and a module outside the network, is ignored."""
        if module is not None and module in self._paths:
            self._unclaimed -= {f"{self.path(module)}.{name}" for name, _ in module.named_parameters()}

    def layers(
        self, readers: Mapping[str, Callable[[Any, LeafReader], Any]], modules: Iterable[Any]
    ) -> tuple[Any, ...]:
        """The descriptions of modules, in order. Skips None and nn.Identity, which compute nothing.

        readers: for each kind (see kind) that may occur, the function of module and LeafReader that describes it.
        Raises Refusal for any other kind.
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
        """The description of an nn.Linear, of a host's linear layer, or of a 1x1 convolution, which is a linear layer
        over the channels. Raises Refusal for any other module."""
        layer = self._within(module)
        if isinstance(layer, nn.Conv2d):
            pointwise = self.convolution(module)
            if (pointwise.kernel, pointwise.stride, pointwise.padding) != (1, 1, 0):
                raise self.unknown(module, "a convolution of another size was expected to be 1x1")
            return Linear(pointwise.path, pointwise.in_channels, pointwise.out_channels)
        if not is_linear(layer):
            raise self.unknown(layer, "expected a linear layer")
        self._claim(module)
        out_features, in_features = layer.weight.shape
        return Linear(self.path(module), in_features, out_features)

    def convolution(self, module: Any) -> Convolution:
        """The description of an nn.Conv2d. Raises Refusal unless it is square, undilated and in one group, and is
        padded by a number of pixels with zeros or with the opposite edges (PADDING_MODES)."""
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
        """The description of an nn.GroupNorm. Raises Refusal for any other module, and for one without weight and
        bias."""
        if not isinstance(module, nn.GroupNorm) or not module.affine:
            raise self.unknown(module, "expected a group norm with weight and bias")
        self._claim(module)
        return GroupNorm(self.path(module), module.num_channels, module.num_groups, module.eps)

    def layer_norm(self, module: Any) -> LayerNorm:
        """The description of an nn.LayerNorm over the last dimension. Raises Refusal for any other module, and for one
        without weight."""
        if not isinstance(module, nn.LayerNorm) or not module.elementwise_affine:
            raise self.unknown(module, "expected a layer norm with weight")
        self._claim(module)
        return LayerNorm(self.path(module), module.normalized_shape[-1], module.eps)

    def rms_norm(self, module: Any) -> RMSNorm:
        """The description of torch's RMSNorm, or of a host's class of that name. Raises Refusal for any other module,
        and for one without weight or with a bias. If the module has an attribute `add` that is True, it multiplies by 1
        + weight."""
        plus_one = getattr(module, "add", False)
        has_bias = getattr(module, "bias", None) is not None
        is_known = module.weight is not None and not has_bias and plus_one in (True, False)
        if type(module).__name__ != "RMSNorm" or not is_known:
            raise self.unknown(module, "expected a root mean square norm with weight")
        self._claim(module)
        if module.eps is None and not has_float32s_epsilon():
            raise self.unknown(module, "it has no epsilon, and this torch takes another one for each dtype")
        eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
        return RMSNorm(self.path(module), len(module.weight), eps, bool(plus_one))

    def adaptive_norm(self, module: Any, width: int) -> AdaptiveNorm:
        """The description of a layer norm over the last dimension, of size `width`, that has neither weight nor bias,
        because a modulation follows it. Raises Refusal for any other norm."""
        if module.weight is not None or module.bias is not None or tuple(module.normalized_shape) != (width,):
            raise self.unknown(module, "expected a layer norm without weight")
        return AdaptiveNorm(width, float(module.eps))

    def parameter(self, module: Any, name: str) -> FreeParameter:
        """The description of a parameter that a module has besides its layers, such as a table or a learned token.
        name: of the module's attribute. Claims this parameter alone. Raises Refusal if the module has none of this
        name."""
        tensor = module._parameters.get(name)
        if tensor is None:
            raise self.unknown(module, f"it has no {name}")
        path = ".".join(filter(None, (self.path(module), name)))
        self._unclaimed.discard(path)
        return FreeParameter(path, tuple(tensor.shape))

    def shifted_norm(self, module: Any, weight: str) -> RMSNorm:
        """The description of an RMS norm that multiplies by 1 + weight in float32 (RMSNorm.as_stored).

        The caller has checked the module's class. weight: the name of its parameter.
        """
        parameter = self.parameter(module, weight)
        return RMSNorm(parameter.path, parameter.shape[0], module.eps, plus_one=True, as_stored=True)

    def fused(self, name: str, *modules: Any) -> FusedLinear:
        """The description of linear layers over the same input, to be computed as one product. name: of the group, by
        which weights are looked up; it may be any text that no other group of the network has. Raises Refusal if the
        layers' inputs differ in width."""
        members = tuple(self.linear(module) for module in modules)
        if len({member.in_features for member in members}) != 1:
            raise Refusal(f"{name} takes inputs of different widths")
        return FusedLinear(name, members)

    def _claim(self, module: nn.Module) -> None:
        """Claim a layer's weight and bias, and the matrices of a LoRA around it. Any other parameter stays unclaimed.

        Raises Refusal if the layer's forward may compute something else than torch's.
        """
        layer = self._within(module)
        if next(layer.children(), None) is not None:
            raise self.unknown(layer, "it has layers of its own inside")
        if not computes_as_torch(type(layer)):
            raise self.unknown(layer, "its forward is not the one of torch")
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
                self.leave(None if part is layer else part)

    def _within(self, module: Any) -> Any:
        """The layer that has the weight and bias: the one inside a LoRA, or the module itself. Raises Refusal for
        another adapter of peft."""
        if not type(module).__module__.startswith("peft."):
            return module
        if not (self._reads_loras and is_lora(type(module))):
            raise self.unknown(module, "of peft's adapters, OneDiff reads only plain LoRAs")
        return layer_within(module)

    def unknown(self, module: Any, why: str = "") -> Refusal:
        """A Refusal for a module that cannot be read. why: what is unusual about it; "" if its class is not known.

        If another extension has put a module of its own class there, or above it, the reason names the extension.
        """
        where = self._paths.get(module, "?") if isinstance(module, nn.Module) else "?"
        replaced = None if why else self._foreign_at(where)
        if replaced is not None:
            place, kind = replaced
            # An extension's Python module may be missing from sys.modules, but a function of it knows its file.
            owner = author(vars(kind).get("forward", kind))
            return Refusal(f"{owner} has replaced {place} by its own {kind.__qualname__}")
        kind = type(module)
        reason = f": {why}" if why else ", which OneDiff does not know"
        return Refusal(f"{where} is a {kind.__module__}.{kind.__qualname__}{reason}")

    def _foreign_at(self, path: str) -> tuple[str, type] | None:
        """The first module on the way from the network down to this path that is of a foreign class, neither torch's
        nor from the network's package: its own path, and the class. None if all classes on the way are known."""
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
    """Whether this torch's RMS norm without an epsilon uses float32's in narrower dtypes too (other versions use each
    dtype's own)."""
    small = torch.full((1,), 2.0**-4, dtype=torch.bfloat16, device="cpu")
    return torch.equal(functional.rms_norm(small, (1,)), torch.ones_like(small))


def computes_as_torch(kind: type) -> bool:
    """Whether a layer class's forward is torch's own, or that of a class in HOST_LAYERS: its own, or inherited. False
    if a derived class overrides it."""
    owner = next(base for base in kind.__mro__ if "forward" in base.__dict__)
    return HOST_LAYERS.has(owner) or (package(owner.__module__) == "torch" and is_genuine(owner))


def is_linear(layer: Any) -> bool:
    """Whether a layer is an nn.Linear, or of a class Linear in HOST_LAYERS, which need not be derived from it."""
    kind = type(layer)
    return isinstance(layer, nn.Linear) or (kind.__name__ == "Linear" and HOST_LAYERS.has(kind))


def is_class(kind: type, module: str, *names: str) -> bool:
    """Whether a class is the one that this Python module defines under one of these names: the same object, not another
    class that has the same name."""
    return kind.__module__ == module and kind.__qualname__ in names and is_genuine(kind)


def is_genuine(kind: type) -> bool:
    """Whether a class is the object that its Python module has under its name, not another class that claims the
    name."""
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind

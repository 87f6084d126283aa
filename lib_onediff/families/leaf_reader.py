"""Read the leaf modules that hold parameters, and keep account of them."""
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

PADDING_MODES = {"zeros": False, "circular": True}


class HostLayers:
    """The classes of layers that hosts define: their parameters mean what those of torch's layer of the same name mean,
    and their forward computes the same, such as in float32 and back. Each host hands in its own."""

    def __init__(self) -> None:
        self._classes: set[tuple[str, str]] = set()

    def take(self, package: str, *classes: str) -> None:
        """Register classes of a host's package, by their qualified names."""
        self._classes.update((package, name) for name in classes)

    def has(self, kind: type) -> bool:
        """Whether this class is one of them."""
        return (package(kind.__module__), kind.__qualname__) in self._classes


HOST_LAYERS = HostLayers()


class LeafReader:
    """Turns the leaf modules of a network into descriptions, and keeps account of its parameters: those that no
    description covers are refused at the end.

    A layer with a LoRA around it is described as it is without, by the LoRA's path. reads_loras: whether the host has a
    function reader for LoRAs; else they are refused.
    """

    def __init__(self, network: nn.Module, reads_loras: bool = False) -> None:
        self._reads_loras = reads_loras
        self._packages = ("torch", package(type(network).__module__))
        self._paths: dict[nn.Module, str] = {module: name for name, module in network.named_modules()}
        self._unclaimed = {name for name, _ in network.named_parameters()}

    def path(self, module: nn.Module) -> str:
        return self._paths[module]

    def kind(self, module: object) -> str:
        """The name of a module's class, if torch or the network's own package has this very class by that name; else
        its full name, which no reader knows."""
        kind = type(module)
        known = package(kind.__module__) in self._packages and is_genuine(kind)
        return kind.__name__ if known else f"{kind.__module__}.{kind.__qualname__}"

    def require(self, module: Any, **wanted: Any) -> None:
        """Raise Refusal where a module's attributes are not these."""
        odd = next((name for name, value in wanted.items() if getattr(module, name) != value), None)
        if odd is not None:
            raise self.unknown(module, f"its {odd} is {getattr(module, odd)!s:.40}".partition("\n")[0])

    def expect(self, kind: str, *modules: Any) -> None:
        """Raise Refusal for the first of these that is of another kind."""
        for module in modules:
            if self.kind(module) != kind:
                raise self.unknown(module, f"expected {kind}")

    def refuse_unclaimed(self) -> None:
        """Raise Refusal if the module has parameters that no description covers (an adapter's, say)."""
        if self._unclaimed:
            example = min(self._unclaimed)
            raise Refusal(f"{len(self._unclaimed)} parameters that we do not know, such as {example}")

    def leave(self, module: nn.Module | None) -> None:
        """Mark the parameters of a module below the network as known but unused by our forward: calls bring what
        computes with them, or nothing does now. Any other module is ignored."""
        if module is not None and module in self._paths:
            self._unclaimed -= {f"{self.path(module)}.{name}" for name, _ in module.named_parameters()}

    def layers(
        self, readers: Mapping[str, Callable[[Any, LeafReader], Any]], modules: Iterable[Any]
    ) -> tuple[Any, ...]:
        """The descriptions of modules, by the readers of their kinds. None and an Identity compute nothing."""
        found = []
        for module in modules:
            if module is not None and not isinstance(module, nn.Identity):
                reader = readers.get(self.kind(module))
                if reader is None:
                    raise self.unknown(module)
                found.append(reader(module, self))
        return tuple(found)

    def linear(self, module: Any) -> Linear:
        """An nn.Linear, a host's own, or a 1x1 convolution."""
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
            # Without padding there is nothing beyond the edge: the same layer either way.
            circular=padding[0] > 0 and PADDING_MODES[layer.padding_mode],
        )

    def group_norm(self, module: Any) -> GroupNorm:
        if not isinstance(module, nn.GroupNorm) or not module.affine:
            raise self.unknown(module, "expected a group norm with weight and bias")
        self._claim(module)
        return GroupNorm(self.path(module), module.num_channels, module.num_groups, module.eps)

    def layer_norm(self, module: Any) -> LayerNorm:
        if not isinstance(module, nn.LayerNorm) or not module.elementwise_affine:
            raise self.unknown(module, "expected a layer norm with weight")
        self._claim(module)
        return LayerNorm(self.path(module), module.normalized_shape[-1], module.eps)

    def rms_norm(self, module: Any) -> RMSNorm:
        """A root mean square norm. An attribute `add` of the host's module that is True: it multiplies by 1 + weight.
        """
        plus_one = getattr(module, "add", False)
        has_bias = getattr(module, "bias", None) is not None
        is_known = module.weight is not None and not has_bias and plus_one in (True, False)
        if type(module).__name__ != "RMSNorm" or not is_known:
            raise self.unknown(module, "expected a root mean square norm with weight")
        self._claim(module)
        if module.eps is None and not has_float32s_epsilon():
            raise self.unknown(module, "this torch takes another epsilon for each type")
        eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
        return RMSNorm(self.path(module), len(module.weight), eps, bool(plus_one))

    def adaptive_norm(self, module: Any, width: int) -> AdaptiveNorm:
        """A layer norm without weight."""
        if module.weight is not None or module.bias is not None or tuple(module.normalized_shape) != (width,):
            raise self.unknown(module, "expected a layer norm without weight")
        return AdaptiveNorm(width, float(module.eps))

    def parameter(self, module: Any, name: str) -> FreeParameter:
        """The parameter that a module has by this name, where the module is no layer."""
        tensor = module._parameters.get(name)
        if tensor is None:
            raise self.unknown(module, f"it has no {name}")
        path = ".".join(filter(None, (self.path(module), name)))
        self._unclaimed.discard(path)
        return FreeParameter(path, tuple(tensor.shape))

    def shifted_norm(self, module: Any, weight: str) -> RMSNorm:
        """A root mean square norm of the network's own class, which multiplies by 1 + weight in float32. weight: the
        parameter's name."""
        parameter = self.parameter(module, weight)
        return RMSNorm(parameter.path, parameter.shape[0], module.eps, plus_one=True, as_stored=True)

    def fused(self, name: str, *modules: Any) -> FusedLinear:
        members = tuple(self.linear(module) for module in modules)
        if len({member.in_features for member in members}) != 1:
            raise Refusal(f"{name} takes inputs of different widths")
        return FusedLinear(name, members)

    def _claim(self, module: nn.Module) -> None:
        """Account for the weight and the bias of a layer, and for a LoRA around it. What else the module holds stays
        unclaimed, or is refused here."""
        layer = self._within(module)
        if next(layer.children(), None) is not None:
            raise self.unknown(layer, "it has layers of its own inside")
        if not computes_as_torch(type(layer)):
            raise self.unknown(layer, "its forward is its own")
        if not isinstance(getattr(layer, "weight", None), nn.Parameter):
            raise self.unknown(layer, "it has no weight")
        if getattr(layer, "scale_weight", None) is not None:
            raise self.unknown(layer, "its weight is stored scaled")
        # input_scale: by which a host rounds what a layer in 8 bits reads. Ours finds its own.
        for name in ("weight", "bias", "input_scale"):
            if getattr(layer, name, None) is not None:
                self._unclaimed.discard(f"{self.path(layer)}.{name}")
        if layer is not module:
            for part in module.children():
                self.leave(None if part is layer else part)

    def _within(self, module: Any) -> Any:
        """The layer in which a module has weight and bias."""
        if not type(module).__module__.startswith("peft."):
            return module
        if not (self._reads_loras and is_lora(type(module))):
            raise self.unknown(module, "of peft's layers, only plain LoRAs are read")
        return layer_within(module)

    def unknown(self, module: Any, why: str = "") -> Refusal:
        """A Refusal for a module that has no reader. It names the code that has put a module of its own there, or
        above, if any has. why: what is unusual about a module of a known class."""
        where = self._paths.get(module, "?") if isinstance(module, nn.Module) else "?"
        replaced = None if why else self._foreign_at(where)
        if replaced is not None:
            place, kind = replaced
            # An extension's module may be missing from sys.modules: its functions know their file.
            owner = author(vars(kind).get("forward", kind))
            return Refusal(f"{owner} has put a {kind.__qualname__} in the place of {place}")
        kind = type(module)
        reason = f": {why}" if why else ", which we do not know"
        return Refusal(f"{where} is a {kind.__module__}.{kind.__qualname__}{reason}")

    def _foreign_at(self, path: str) -> tuple[str, type] | None:
        """The first module on the way down to a path whose class is neither torch's nor the network's package's: its
        path and its class."""
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
    """Whether torch's RMS norm takes float32's epsilon in narrower types too, where it is given none."""
    small = torch.full((1,), 2.0**-4, dtype=torch.bfloat16, device="cpu")
    return torch.equal(functional.rms_norm(small, (1,)), torch.ones_like(small))


def computes_as_torch(kind: type) -> bool:
    """Whether a layer's class has torch's own forward, or one of a host's that computes the same."""
    owner = next(base for base in kind.__mro__ if "forward" in base.__dict__)
    return HOST_LAYERS.has(owner) or (package(owner.__module__) == "torch" and is_genuine(owner))


def is_linear(layer: Any) -> bool:
    """Whether a layer is an nn.Linear, or a host's class of that name, which need not be derived from it."""
    kind = type(layer)
    return isinstance(layer, nn.Linear) or (kind.__name__ == "Linear" and HOST_LAYERS.has(kind))


def is_class(kind: type, module: str, *names: str) -> bool:
    """Whether a class is the one, or one of those, that a Python module defines by these names: this very object, and
    no other that is called so."""
    return kind.__module__ == module and kind.__qualname__ in names and is_genuine(kind)


def is_genuine(kind: type) -> bool:
    """Whether a class is what its module has by its name, and no other that calls itself so."""
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind

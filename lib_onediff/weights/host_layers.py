"""The layers of a host's network that a layout describes, by their paths, with their parameters as they are now."""
from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..core.leaves import RMSNorm
from ..core.origins import layer_within
from ..core.refusal import Refusal
from .stored import Format, StoredReader, StoredWeight

LAYERS_GONE = "a part of this model has been replaced or unloaded"


class HostLayers:
    """The layers of one network. Keeps no module and no tensor alive: drop the results of the methods after the call.

    A path, such as "blocks.0.norm", is that of a layer with a weight and perhaps a bias, or that of a single parameter:
    a parameter that our forward reads by itself, from a module that is no such layer. A weight "in few bits" is one
    that the host stores in 4 or 8 bits, with scales (weights/stored.py).

    Methods raise Refusal if the host has unloaded a layer that they read.

    reader: reads the weights that the host stores in few bits. None if it stores none so.
    formats: of each weight in few bits, by path, its Format and its shape when decoded, as of the last read_formats();
        empty before.
    as_stored: the paths of the parameters that the host never casts.
    """

    def __init__(self, network: nn.Module, leaves: Sequence[Any], reader: StoredReader | None) -> None:
        """leaves: the descriptions of the layers (core.leaves), each with its path in the network."""
        self.reader = reader
        self.formats: dict[str, tuple[Format, tuple[int, ...]]] = {}
        self.as_stored = frozenset(leaf.path for leaf in leaves if isinstance(leaf, RMSNorm) and leaf.as_stored)
        holders = {leaf.path: holder_of(network, leaf.path) for leaf in leaves}
        self._modules = {path: weakref.ref(layer_within(module)) for path, (module, _) in holders.items()}
        # The names of single parameters in their modules.
        self._names = {path: name for path, (_, name) in holders.items() if name}
        # The modules that the host calls: the layers, or the LoRA layers around them.
        self._called = [weakref.ref(module) for module, _ in holders.values()]

    def follow(self, network: nn.Module) -> bool:
        """Look up the modules at the paths again, after the network's modules have changed: LoRA layers may have been
        put around the layers, or removed. Returns True if the layers themselves are the same ones; otherwise False, and
        changes nothing."""
        called = [holder_of(network, path)[0] for path in self._modules]
        known = self._modules.values()
        if any(layer_within(module) is not layer() for module, layer in zip(called, known, strict=True)):
            return False
        self._called = list(map(weakref.ref, called))
        return True

    # --- modules ----------------------------------------------------------------------------------------------------

    def paths(self) -> list[str]:
        """All paths, in the order of the layout."""
        return list(self._modules)

    def module(self, path: str) -> nn.Module:
        """The layer at a path, without a LoRA layer around it; for a single parameter, the module that has it. Raises
        Refusal if it was unloaded."""
        module = self._modules[path]()
        if module is None:
            raise Refusal(LAYERS_GONE)
        return module

    def by_path(self) -> dict[str, nn.Module]:
        """The layers by their paths in the network, and the modules that have single parameters by the modules' paths
        ("" for the network itself)."""
        found: dict[str, nn.Module] = {}
        for path in self._modules:
            found[path.rpartition(".")[0] if path in self._names else path] = self.module(path)
        return found

    def modules(self) -> list[nn.Module]:
        """The layers, and the modules that have single parameters, each once: the values of by_path()."""
        return list(self.by_path().values())

    def casting(self) -> list[nn.Module]:
        """The layers that may cast their own parameters: all but the modules that have single parameters, which the
        forward of the network casts."""
        return [self.module(path) for path in self._modules if path not in self._names]

    def called(self) -> list[nn.Module]:
        """The module that the host calls for each of paths(), in their order: the layer, or the LoRA layer around it;
        for a single parameter, the module that has it."""
        pairs = zip(self._called, self._modules.values(), strict=True)
        return all_alive(called() or layer() for called, layer in pairs)

    def alive(self) -> list[nn.Module]:
        """The layers that exist now, and the modules with single parameters: those that the host has not unloaded. They
        may be fewer than paths(); raises no Refusal."""
        return [module for reference in self._modules.values() if (module := reference()) is not None]

    def is_alive(self, path: str) -> bool:
        """Whether the layer at a path exists. False after the host has unloaded it."""
        return self._modules[path]() is not None

    # --- parameters -------------------------------------------------------------------------------------------------

    def weight_and_bias(self, path: str) -> tuple[Tensor, Tensor | None]:
        """A layer's weight, and its bias or None. A single parameter is returned as a weight without a bias. A weight
        in few bits is returned as its stored values, (rows, ...), which are not decoded. Raises Refusal if the layer or
        the parameter was unloaded."""
        module = self.module(path)
        if path in self._names:
            single = module._parameters.get(self._names[path])
            if single is None:
                raise Refusal(LAYERS_GONE)
            return single, None
        bias = module._parameters.get("bias")
        stored = self.stored(path)
        if stored is not None:
            return stored.values, bias
        weight = module._parameters["weight"]
        if weight is None:
            raise Refusal(LAYERS_GONE)
        return weight, bias

    def parameters(self) -> list[Tensor]:
        """All tensors that the layers compute with, in the order of the layout: parameters, and the stored values and
        the scales of weights in few bits."""
        if not self.formats:
            return [one for layer in self.modules() for one in layer._parameters.values() if one is not None]
        found: list[Tensor] = []
        for path in self._modules:
            stored = self.stored(path)
            found += [one for one in self.weight_and_bias(path) if one is not None]
            found += [] if stored is None else stored.scales
        return found

    def vectors(self) -> list[Tensor]:
        """The parameters of one dimension: biases, and the weights of norms."""
        found: list[Tensor] = []
        for path in self._modules:
            found += [one for one in self.weight_and_bias(path) if one is not None and one.dim() == 1]
        return found

    def tensors_of(self, layer: nn.Module) -> list[Tensor]:
        """The tensors of one of the layers: its parameters, or the stored values and scales. For a weight in few bits
        whose format is unknown too, where other methods raise Refusal."""
        found: Iterable[Tensor | None] = layer._parameters.values()
        if self.reader is not None:
            found = self.reader.tensors([layer])
        return [one for one in found if one is not None]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the network: that of the first weight that is neither in few bits nor in as_stored. Every
        network must have such a weight (StopIteration)."""
        plain = (path for path in self._modules if path not in self.formats and path not in self.as_stored)
        return self.weight_and_bias(next(plain))[0].dtype

    def shape(self, path: str) -> tuple[int, ...]:
        """The shape of a layer's weight; for a weight in few bits, its shape when decoded."""
        stored = self.stored(path)
        return tuple(self.weight_and_bias(path)[0].shape) if stored is None else stored.shape

    # --- weights in few bits ----------------------------------------------------------------------------------------

    def read_formats(self) -> dict[str, StoredWeight]:
        """The weights in few bits, by path; {} if there are none. Sets `formats`. Raises Refusal if a format is
        unknown.
        """
        found: dict[str, StoredWeight] = {}
        for path in self._modules if self.reader is not None else ():
            stored = None if path in self._names else self._read(path)
            if stored is not None:
                found[path] = stored
        self.formats = {path: (one.format, one.shape) for path, one in found.items()}
        return found

    def stored(self, path: str) -> StoredWeight | None:
        """The weight of a layer as the host stores it in few bits; None for a layer that was not in few bits at the
        last read_formats()."""
        return self._read(path) if path in self.formats else None

    def _read(self, path: str) -> StoredWeight | None:
        """The weight of a layer as the host stores it in few bits now; None for one that is not in few bits."""
        return None if self.reader is None else self.reader.weight(self.module(path), path)

    def format_names(self) -> list[str]:
        """The names (Format.name) of the formats of the weights in few bits, each once, the most frequent one first."""
        return [name for name, _ in Counter(format.name for format, _ in self.formats.values()).most_common()]

    def rounded_inputs(self) -> frozenset[tuple[torch.dtype, int]]:
        """The eight-bit types to which the host rounds the inputs of layers in few bits, each with the rotation that it
        applies to the input before (see QuantizedWeight). Empty if it decodes all weights instead."""
        formats = [format for format, _ in self.formats.values()]
        return frozenset((format.kind.dtype, format.rotation) for format in formats if format.kind is not None)


def holder_of(network: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module at a path of HostLayers, and "". If the path is that of a single parameter: the module that has it,
    and the parameter's name in that module."""
    above, _, name = path.rpartition(".")
    parent = network.get_submodule(above)
    return (parent, name) if name in parent._parameters else (parent.get_submodule(name), "")


def all_alive(layers: Iterable[nn.Module | None]) -> list[nn.Module]:
    """The same layers as a list. Raises Refusal if one of them is None, because the host has unloaded it."""
    found = list(layers)
    if None in found:
        raise Refusal(LAYERS_GONE)
    return cast(list[nn.Module], found)

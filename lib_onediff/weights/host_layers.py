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

LAYERS_GONE = "the WebUI has replaced or unloaded layers of this network"


class HostLayers:
    """The layers of one network. Keeps no module and no tensor alive: drop the results of the methods after the call.

    A path is that of a layer with a weight and a bias, or that of a single parameter, which some other module has.
    Methods raise Refusal if the host has unloaded a layer that they read.

    reader: of the weights that the host stores in few bits. None if it stores none.
    formats: how such weights are stored, and their decoded shapes, by path, as of the last read_formats().
    as_stored: the paths of the parameters that the host never casts.
    """

    def __init__(self, network: nn.Module, leaves: Sequence[Any], reader: StoredReader | None) -> None:
        """leaves: of the network's layout."""
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
        """Note anew which LoRA layers are around the layers of the network. Returns False, and changes nothing, if a
        layer was replaced by another one."""
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
        """The layer at a path; of a single parameter, the module that has it."""
        module = self._modules[path]()
        if module is None:
            raise Refusal(LAYERS_GONE)
        return module

    def by_path(self) -> dict[str, nn.Module]:
        """The layers by their paths in the network, and the modules that have single parameters by theirs."""
        found: dict[str, nn.Module] = {}
        for path in self._modules:
            found[path.rpartition(".")[0] if path in self._names else path] = self.module(path)
        return found

    def modules(self) -> list[nn.Module]:
        """The values of by_path()."""
        return list(self.by_path().values())

    def casting(self) -> list[nn.Module]:
        """The layers, without the modules that have single parameters: a layer may cast its parameters by itself, but a
        single parameter is cast by the forward of the network."""
        return [self.module(path) for path in self._modules if path not in self._names]

    def called(self) -> list[nn.Module]:
        """The module that the host calls for each of paths(): the layer, or the LoRA layer around it; for a single
        parameter, the module that has it."""
        pairs = zip(self._called, self._modules.values(), strict=True)
        return all_alive(called() or layer() for called, layer in pairs)

    def alive(self) -> list[nn.Module]:
        """The layers that the host has not unloaded."""
        return [module for reference in self._modules.values() if (module := reference()) is not None]

    def is_alive(self, path: str) -> bool:
        """Whether the host has not unloaded the layer at a path."""
        return self._modules[path]() is not None

    # --- parameters -------------------------------------------------------------------------------------------------

    def weight_and_bias(self, path: str) -> tuple[Tensor, Tensor | None]:
        """A layer's weight and bias, or None. Of a weight in few bits, its values as they are stored, (rows, ...); a
        single parameter is returned as a weight."""
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
        """All tensors that the layers compute with: parameters, and the values and scales of weights in few bits."""
        if not self.formats:
            return [one for layer in self.modules() for one in layer._parameters.values() if one is not None]
        found: list[Tensor] = []
        for path in self._modules:
            stored = self.stored(path)
            found += [one for one in self.weight_and_bias(path) if one is not None]
            found += [] if stored is None else stored.scales
        return found

    def vectors(self) -> list[Tensor]:
        """The biases, and the weights of norms."""
        found: list[Tensor] = []
        for path in self._modules:
            found += [one for one in self.weight_and_bias(path) if one is not None and one.dim() == 1]
        return found

    def tensors_of(self, layer: nn.Module) -> list[Tensor]:
        """The tensors of one of the layers, also if its format is unknown."""
        found: Iterable[Tensor | None] = layer._parameters.values()
        if self.reader is not None:
            found = self.reader.tensors([layer])
        return [one for one in found if one is not None]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first parameter that is not in few bits and may be cast."""
        plain = (path for path in self._modules if path not in self.formats and path not in self.as_stored)
        return self.weight_and_bias(next(plain))[0].dtype

    def shape(self, path: str) -> tuple[int, ...]:
        """The shape of a layer's weight; of one in few bits, its shape when decoded."""
        stored = self.stored(path)
        return tuple(self.weight_and_bias(path)[0].shape) if stored is None else stored.shape

    # --- weights in few bits ----------------------------------------------------------------------------------------

    def read_formats(self) -> dict[str, StoredWeight]:
        """The weights in few bits by path. Notes their formats. Raises Refusal if a format is unknown."""
        found: dict[str, StoredWeight] = {}
        for path in self._modules if self.reader is not None else ():
            stored = None if path in self._names else self._read(path)
            if stored is not None:
                found[path] = stored
        self.formats = {path: (one.format, one.shape) for path, one in found.items()}
        return found

    def stored(self, path: str) -> StoredWeight | None:
        """The weight of a layer as the host stores it in few bits; None for a layer whose weight is not in few bits."""
        return self._read(path) if path in self.formats else None

    def _read(self, path: str) -> StoredWeight | None:
        return None if self.reader is None else self.reader.weight(self.module(path), path)

    def format_names(self) -> list[str]:
        """The names of the formats of the weights in few bits, the most frequent one first."""
        return [name for name, _ in Counter(format.name for format, _ in self.formats.values()).most_common()]

    def rounded_inputs(self) -> frozenset[tuple[torch.dtype, int]]:
        """The eight-bit types to which the host rounds the inputs of its layers, each with its rotation (see
        QuantizedWeight)."""
        formats = [format for format, _ in self.formats.values()]
        return frozenset((format.kind.dtype, format.rotation) for format in formats if format.kind is not None)


def holder_of(network: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module at a path, and "". If the path is that of a single parameter: the module that has it, and its name."""
    above, _, name = path.rpartition(".")
    parent = network.get_submodule(above)
    return (parent, name) if name in parent._parameters else (parent.get_submodule(name), "")


def all_alive(layers: Iterable[nn.Module | None]) -> list[nn.Module]:
    """The layers. Raises Refusal if one is None: the host has unloaded it."""
    found = list(layers)
    if None in found:
        raise Refusal(LAYERS_GONE)
    return cast(list[nn.Module], found)

"""Bind a host's parameters to a layout: fuse by view, and notice moves, swaps and edits.

A binding keeps no tensor. The host's parameters own their storage (after fusing: a few share one storage), every call
reads them anew, and a fused weight is reconstructed as a view over its members. So an in-place edit is seen at once,
and an unloaded model's memory is freed at once.
"""
from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..core.edits import UNCOUNTED, edit_count
from ..core.layer_weights import LayerWeights, Weights
from ..core.leaves import Convolution, FusedLinear, RMSNorm
from ..core.origins import layer_within
from ..core.refusal import Refusal
from .exact_copy import copy_into, copy_of, rows_of
from .stored import Format, StoredReader, StoredWeight, are_multiplied_alike

BOUND_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Of weights that a host casts at each use.
STORED_DTYPES = (*BOUND_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
MAIN_MEMORY = torch.device("cpu")
NOWHERE = torch.device("meta")
LAYERS_GONE = "the host has replaced or unloaded layers of this UNet"


class Binding:
    """The parameters of one module, in the order and grouping that a layout gives them.

    fusions: the layers whose members are to lie in one tensor. groups: the paths of the layers that do, by the name of
    that: a fused layer's members, and every other layer alone.
    cast_to: the type to which the host casts them at each use; None where it computes with them as they are stored.
    device: where it is computed. away: the layers, fused ones in the place of their members, of which any parameter is
    not there but in main memory.

    A weight that the host stores in few bits stands here as its values: a plain tensor with the layer's rows, whatever
    its type; stored has what decodes them.
    """

    def __init__(self, module: nn.Module, layout: Any, reader: StoredReader | None = None) -> None:
        """layout: the module's, a core.family.Layout. reader: of the host's weights in few bits; None where it has
        none."""
        self.layout = layout
        self.reader = reader
        leaves = layout.leaves()
        holders = {leaf.path: holder_of(module, leaf.path) for leaf in leaves}
        self._leaves = {path: weakref.ref(layer_within(one)) for path, (one, _) in holders.items()}
        # Of the paths of single parameters, by which name the module has them.
        self._names = {path: name for path, (_, name) in holders.items() if name}
        # The parameters that are never cast.
        self.as_stored = frozenset(leaf.path for leaf in leaves if isinstance(leaf, RMSNorm) and leaf.as_stored)
        # The layers as the host calls them: those, or the LoRAs around them.
        self._called = [weakref.ref(one) for one, _ in holders.values()]
        self._every_fusion = tuple(layout.fusions())
        self.fusions = self._every_fusion
        self._convolution_paths = [leaf.path for leaf in leaves if isinstance(leaf, Convolution) and leaf.kernel > 1]
        self._channels_last: set[str] = set()
        self.cast_to: torch.dtype | None = None
        # Of the weights in few bits, by their layers' paths: how they are stored, and their shapes.
        self.formats: dict[str, tuple[Format, tuple[int, ...]]] = {}
        # The paths of the members of fused layers that cannot lie in one tensor, by the fused layer's name.
        self.apart: dict[str, list[str]] = {}
        # By the path of a fused layer's member: that layer's name, the member's first row in it, and how many it has.
        self.fusion_of: dict[str, tuple[str, int, int]] = {}
        self.groups: dict[str, list[str]] = {}
        self.look_for_stored()
        self.device = self._first_weight().device
        self.away: frozenset[str] = frozenset()

    def follow(self, module: nn.Module, layout: Any) -> bool:
        """Note anew which wrappers (LoRA layers) are around the layers of a module. Returns False, and changes nothing,
        where the layout or any layer itself is another one: then the module needs a new Binding. layout: the module's
        as it is now."""
        if layout != self.layout:
            return False
        called = [holder_of(module, path)[0] for path in self._leaves]
        if any(layer_within(one) is not leaf() for one, leaf in zip(called, self._leaves.values(), strict=True)):
            return False
        self.layout = layout
        self._called = list(map(weakref.ref, called))
        return True

    def bind(self, channels_last: bool = False, device: torch.device | None = None) -> int:
        """Let the members of every fused layer share one storage, but for those that are away, and the convolutions'
        weights lie channels-last, or as torch makes them; what already does is left as it is. device: where it is
        computed from now on; None: where the first layer is.

        Returns the bytes that were copied. Parameters are re-pointed (Parameter.data), never written: a host may keep
        the old storage as its backup. Raises Refusal if the parameters are of a dtype that we do not run, or lie on
        other devices than this one and main memory.
        """
        self.device = self._first_weight().device if device is None else device
        self.look_for_stored()
        self.refuse_mixture()
        for parameter in self.parameters():
            mend(parameter)
        self.away = frozenset(name for name in self.groups if any(
            lies_away(parameter, self.device) for parameter in chain(*self.parts(name))
        ))
        if self.away and device is None:
            raise Refusal("a part of its weights is in main memory")
        if channels_last:
            copied = sum(self._set_memory_format(path, torch.channels_last) for path in self._convolution_paths)
        else:
            copied = self.restore_memory_formats()
        for fusion in self.fusions:
            if fusion.name not in self.away:
                copied += sum(fuse(parts) for parts in self.parts(fusion.name) if parts)
        return copied

    def unbind(self) -> None:
        """Give every parameter a storage of its own again, and every convolution its usual memory format."""
        self.restore_memory_formats()
        for leaf in self._leaves.values():
            layer = leaf()
            for parameter in () if layer is None else self._held_by(layer):
                if shares_storage(parameter):
                    # Where the card is full, it goes on sharing, which the host can compute with as well.
                    with (
                        suppress(torch.cuda.OutOfMemoryError), torch.no_grad(),
                        torch.inference_mode(parameter.is_inference()),
                    ):
                        parameter.data = copy_of(parameter)

    def _held_by(self, layer: nn.Module) -> list[Tensor]:
        """The tensors that a layer has now, in a format that is not known as well."""
        found: Iterable[Tensor | None] = layer._parameters.values()
        if self.reader is not None:
            found = self.reader.tensors([layer])
        return [one for one in found if one is not None]

    def restore_memory_formats(self) -> int:
        """Put the convolutions' weights that we have laid out channels-last back into torch's usual memory format;
        others may be channels-last by the host's choice. Returns the bytes copied."""
        copied = sum(self._set_memory_format(path, torch.contiguous_format) for path in list(self._channels_last))
        self._channels_last.clear()
        return copied

    def _set_memory_format(self, path: str, memory_format: torch.memory_format) -> int:
        """Lay a convolution's weight out in a memory format, unless it is. Returns the bytes copied."""
        if self._leaves[path]() is None or path in self.formats:
            return 0
        weight = self._parameters(path)[0]
        if weight.is_contiguous(memory_format=memory_format):
            return 0
        with torch.no_grad(), torch.inference_mode(weight.is_inference()):
            weight.data = in_memory_format(weight, memory_format)
        self._channels_last.add(path)
        return weight.numel() * weight.element_size()

    def paths(self) -> list[str]:
        """Of the modules that hold the parameters, and of single parameters, in the order of the layout."""
        return list(self._leaves)

    def layers(self) -> list[nn.Module]:
        """The host's modules whose own the parameters are, each once. Drop the result after the call. Raises Refusal if
        one is gone."""
        return list(self.modules().values())

    def modules(self) -> dict[str, nn.Module]:
        """As layers, by their paths in the network."""
        layers = all_alive(leaf() for leaf in self._leaves.values())
        found: dict[str, nn.Module] = {}
        for path, layer in zip(self._leaves, layers, strict=True):
            found[path.rpartition(".")[0] if path in self._names else path] = layer
        return found

    def casting_layers(self) -> list[nn.Module]:
        """Those of layers that may cast their parameters by themselves: not the modules of single parameters, which the
        network's own forward casts. Drop the result after the call. Raises Refusal if one is gone."""
        return all_alive(leaf() for path, leaf in self._leaves.items() if path not in self._names)

    def called_layers(self) -> list[nn.Module]:
        """The modules that hold the parameters, or the LoRAs around them, for each of paths()."""
        pairs = zip(self._called, self._leaves.values(), strict=True)
        return all_alive(called() or leaf() for called, leaf in pairs)

    def parameters(self) -> list[Tensor]:
        """The tensors that all layers compute with, in their order: parameters, and in the place of a weight in few
        bits its values and scales. Drop the result after the call. Raises Refusal if a layer is gone."""
        if not self.formats:
            return [one for layer in self.layers() for one in layer._parameters.values() if one is not None]
        found: list[Tensor] = []
        for path in self._leaves:
            stored = self.stored(path)
            found += [one for one in self._parameters(path) if one is not None]
            found += [] if stored is None else stored.scales
        return found

    def stored(self, path: str) -> StoredWeight | None:
        """The weight of a layer that is in few bits, as it is now; None where it is a plain tensor. Drop the result
        after the call. Raises Refusal where the layer is gone."""
        if path not in self.formats or self.reader is None:
            return None
        return self.reader.weight(self.layer(path), path)

    def rounded_inputs(self) -> frozenset[tuple[torch.dtype, int]]:
        """The types of eight bits to which the host rounds the inputs of its layers, each with each rotation."""
        formats = [format for format, _ in self.formats.values()]
        return frozenset((format.kind.dtype, format.rotation) for format in formats if format.kind is not None)

    def format_names(self) -> list[str]:
        """The names of the formats of the weights in few bits, the most frequent one first."""
        return [name for name, _ in Counter(format.name for format, _ in self.formats.values()).most_common()]

    def _shape(self, path: str) -> tuple[int, ...]:
        """The shape of a layer's weight, decoded."""
        stored = self.stored(path)
        return tuple(self._parameters(path)[0].shape) if stored is None else stored.shape

    def look_for_stored(self) -> None:
        """Note anew which weights are in few bits, and which layers can lie together: not those of a format that is not
        stored row by row, nor those whose values are of several types. Raises Refusal for a format that is not known.
        """
        reader = self.reader
        layers = () if reader is None else [path for path in self._leaves if path not in self._names]
        found = {} if reader is None else {path: reader.weight(self.layer(path), path) for path in layers}
        stored = {path: one for path, one in found.items() if one is not None}
        self.formats = {path: (one.format, one.shape) for path, one in stored.items()}
        together: list[FusedLinear] = []
        self.apart = {}
        for fusion in self._every_fusion:
            paths = [member.path for member in fusion.members]
            if self._can_lie_together(paths, stored):
                together.append(fusion)
            else:
                self.apart[fusion.name] = paths
        self.fusions = tuple(together)
        self.fusion_of = {}
        for fusion in self.fusions:
            first = 0
            for member in fusion.members:
                self.fusion_of[member.path] = fusion.name, first, member.out_features
                first += member.out_features
        self.groups = {path: [path] for path in self._leaves if path not in self.fusion_of}
        self.groups |= {fusion.name: [member.path for member in fusion.members] for fusion in self.fusions}

    def _can_lie_together(self, paths: Sequence[str], stored: Mapping[str, StoredWeight]) -> bool:
        """Whether the weights of layers can be rows of one tensor. stored: those in few bits, by path."""
        if stored.keys().isdisjoint(paths):
            return True
        if not all(stored[path].format.is_by_rows for path in paths if path in stored):
            return False
        return len({self._parameters(path)[0].dtype for path in paths}) == 1

    def products(self) -> dict[str, list[str]]:
        """The paths of the layers that one product computes: as groups, with layers that cannot lie together."""
        apart = {path for paths in self.apart.values() for path in paths}
        return {name: paths for name, paths in self.groups.items() if name not in apart} | self.apart

    def decoded_layers(self) -> list[nn.Module]:
        """The layers that the host multiplies in eight bits, and our forward decodes: layers over the same input are
        stored in another way. Drop the result after the call. Raises Refusal if one is gone."""
        found: list[nn.Module] = []
        for paths in self.products().values():
            formats = {path: self.formats[path][0] for path in paths if path in self.formats}
            if not are_multiplied_alike(map(formats.get, paths)):
                found += [self.layer(path) for path, one in formats.items() if one.kind is not None]
        return found

    def shapes(self) -> Weights:
        """As weights, with the shape alone, decoded, of what is in few bits, and with a copy of the biases of layers
        that cannot lie together."""
        found = dict(self.weights())
        for name, paths in self.apart.items():
            biases = [bias for path in paths if (bias := self._parameters(path)[1]) is not None]
            found[name] = found[name]._replace(bias=in_one(biases, self.device) if biases else None)
        for name, paths in self.products().items():
            for path in {name, *paths}:
                if not self.formats.keys().isdisjoint(paths):
                    found[path] = found[path]._replace(weight=self._decoded_shape([path] if path in paths else paths))
        return found

    def _decoded_shape(self, paths: Sequence[str]) -> Tensor:
        """A tensor without values, of the shape of these layers' weights one below the other, in the computed type."""
        rows = sum(self._shape(path)[0] for path in paths)
        return torch.empty((rows, *self._shape(paths[0])[1:]), dtype=self.dtype, device=NOWHERE)

    def members(self, name: str) -> list[str]:
        """The paths of a fused layer's members in order; of another layer, its own."""
        return self.groups.get(name) or self.apart.get(name) or [name]

    def decoded(self, path: str, dtype: torch.dtype) -> Tensor | None:
        """The weight of a layer that is in few bits, decoded on the device that computes; None where it is a plain
        tensor."""
        stored = self.stored(path)
        if stored is None:
            return None
        scales = [scale.to(self.device) for scale in stored.scales]
        return stored.decode(stored.values.to(self.device), scales, dtype)

    def vectors(self) -> list[Tensor]:
        """The biases, and the weights of norms."""
        found: list[Tensor] = []
        for path in self._leaves:
            weight, bias = self._parameters(path)
            found += [one for one in (weight, bias) if one is not None and one.dim() == 1]
        return found

    def parts(self, name: str) -> tuple[list[Tensor], list[Tensor]]:
        """The weights and the biases of a layer's members, in order; of one that is not fused, its own."""
        weights: list[Tensor] = []
        biases: list[Tensor] = []
        for path in self.groups[name]:
            weight, bias = self._parameters(path)
            weights.append(weight)
            if bias is not None:
                biases.append(bias)
        return weights, biases

    def holders(self, name: str) -> tuple[list[Tensor], list[Tensor]]:
        """As parts, with the host's own tensors in the place of values; see StoredWeight."""
        weights, biases = self.parts(name)
        found: list[Tensor] = []
        for path, weight in zip(self.groups[name], weights, strict=True):
            stored = self.stored(path)
            found.append(weight if stored is None else stored.holder)
        return found, biases

    def weights_on(self, device: torch.device, name: str) -> LayerWeights:
        """A layer's tensors on a device, wherever they are; views where they are there and lie together."""
        found: list[Any] = []
        for parts in self.parts(name):
            there = joined(parts) if parts and all(part.device == device for part in parts) else None
            found.append(in_one(parts, device) if parts and there is None else there)
        return LayerWeights(*found)

    def weights(self) -> Weights:
        """Every layer's tensors by path, and every fused layer's by its name; of those that are away, and of layers
        that cannot lie together, the shape alone.
        Drop the result after the call.

        Raises Refusal if a fused layer's members no longer lie together (bind again).
        """
        layer_weights = self._layer_weights()
        for fusion in self.fusions:
            is_away = fusion.name in self.away
            layer_weights[fusion.name] = self.weights_on(NOWHERE, fusion.name) if is_away else self._joined(fusion.name)
        for name, paths in self.apart.items():
            layer_weights[name] = LayerWeights(self._decoded_shape(paths), None)
        return layer_weights

    def _joined(self, name: str) -> LayerWeights:
        """A fused layer's weight and bias, as views. Raises Refusal where its members no longer lie together."""
        weights, biases = self.parts(name)
        weight = joined(weights)
        bias = joined(biases) if biases else None
        if weight is None or (biases and (bias is None or len(biases) < len(weights))):
            raise Refusal(f"the layers of {name} no longer lie together")
        return LayerWeights(weight, bias)

    @property
    def dtype(self) -> torch.dtype:
        """Which is computed in."""
        return self.cast_to or self.stored_dtype

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of the first parameter that is not in few bits and may be cast."""
        plain = (path for path in self._leaves if path not in self.formats and path not in self.as_stored)
        return self._parameters(next(plain))[0].dtype

    def _first_weight(self) -> Tensor:
        return self._parameters(next(iter(self._leaves)))[0]

    def _layer_weights(self) -> dict[str, LayerWeights]:
        return {path: LayerWeights(*self._parameters(path)) for path in self._leaves}

    def layer(self, path: str) -> nn.Module:
        """The host's module whose own the parameters of this path are. Drop it after the call. Raises Refusal if it is
        gone."""
        module = self._leaves[path]()
        if module is None:
            raise Refusal(LAYERS_GONE)
        return module

    def _parameters(self, path: str) -> tuple[Tensor, Tensor | None]:
        """A layer's weight, or the values of one in few bits, and its bias; a single parameter as a weight."""
        module = self.layer(path)
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

    def refuse_mixture(self) -> None:
        """Raise Refusal if the parameters are of a dtype that we do not run, or lie neither on the device nor in main
        memory. What is cast to one type may be stored in several, layer by layer."""
        known = BOUND_DTYPES if self.cast_to is None else STORED_DTYPES
        stored = self.stored_dtype
        layer_weights = self._layer_weights()
        for path, layer in layer_weights.items():
            for parameter in (layer.weight, layer.bias):
                if parameter is None:
                    continue
                if parameter is layer.weight and path in self.formats:
                    self._refuse_elsewhere(path, parameter)
                    continue
                if not isinstance(parameter, nn.Parameter):
                    raise Refusal(f"{path} holds a tensor that is none of its parameters (functional_call?)")
                kind = type(parameter.data)
                if kind is not Tensor or parameter.dtype not in known:
                    found = str(parameter.dtype).removeprefix("torch.") if kind is Tensor else kind.__name__
                    raise Refusal(f"{path} is stored as {found}, which OneDiff does not run")
                self._refuse_elsewhere(path, parameter)
                if self.cast_to is None and parameter.dtype != stored and path not in self.as_stored:
                    raise Refusal(f"its parameters are mixed: {stored}, but {path} is {parameter.dtype}")
        for fusion in self._every_fusion:
            members = [layer_weights[member.path] for member in fusion.members]
            biases = [layer.bias for layer in members if layer.bias is not None]
            has_one_type = fusion.name in self.apart or len({layer.weight.dtype for layer in members}) == 1
            if not has_one_type or len({bias.dtype for bias in biases}) > 1:
                raise Refusal(f"the layers of {fusion.name} are stored in several types")
            if len({layer.bias is None for layer in members}) > 1:
                raise Refusal(f"{fusion.name} has a bias on some of its layers only")

    def _refuse_elsewhere(self, path: str, parameter: Tensor) -> None:
        """Raise Refusal for a parameter that is neither on the device that computes nor in main memory."""
        if parameter.is_meta:
            raise Refusal("its parameters are not loaded (they are on the meta device)")
        if parameter.device not in (self.device, MAIN_MEMORY):
            raise Refusal(f"the network computes on {self.device}, and {path} is on {parameter.device}")


def holder_of(network: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module at a path, and ""; or the module that has the single parameter of this path, and the parameter's name.
    """
    above, _, name = path.rpartition(".")
    parent = network.get_submodule(above)
    return (parent, name) if name in parent._parameters else (parent.get_submodule(name), "")


def lies_away(parameter: Tensor, device: torch.device) -> bool:
    """Whether it is not on the device that computes."""
    return parameter.device != device


def all_alive(layers: Iterable[nn.Module | None]) -> list[nn.Module]:
    """The layers, all of which are alive. Raises Refusal if one is None: the host has unloaded or replaced it."""
    found = list(layers)
    if None in found:
        raise Refusal(LAYERS_GONE)
    return cast(list[nn.Module], found)


def shares_storage(parameter: Tensor) -> bool:
    return parameter.untyped_storage().nbytes() > parameter.numel() * parameter.element_size()


def fuse(parameters: list[Tensor]) -> int:
    """Re-point parameters to slices of one new tensor, unless they already lie together. Returns the bytes copied."""
    if joined(parameters) is not None:
        return 0
    with torch.no_grad(), torch.inference_mode(parameters[0].is_inference()):
        together = in_one(parameters, parameters[0].device)
        for piece, parameter in zip(rows_of(together, list(map(len, parameters))), parameters, strict=True):
            parameter.data = of_kind(piece, parameter.is_inference())
    return together.nbytes


def of_kind(piece: Tensor, is_inference: bool) -> Tensor:
    """The same memory as a tensor of inference mode, or as an ordinary one."""
    if piece.is_inference() == is_inference:
        return piece
    with torch.inference_mode(is_inference):
        empty: Any = torch.empty(0, dtype=piece.dtype, device=piece.device)
        found: Tensor = empty.set_(piece.untyped_storage(), piece.storage_offset(), piece.shape, piece.stride())
        return found


def mend(parameter: Tensor) -> None:
    """Make a parameter that was created in inference mode, and moved outside of it, a tensor of inference mode again.
    After such a move it neither is one nor counts edits, and torch makes no views of it."""
    if not parameter.is_inference() and edit_count(parameter) == UNCOUNTED:
        with torch.no_grad():
            parameter.data = of_kind(parameter.detach(), is_inference=True)


def in_one(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Tensors (rows, ...) of one type, one after the other in a new one on a device. Not every torch joins float8."""
    first = tensors[0]
    made = torch.empty((sum(map(len, tensors)), *first.shape[1:]), dtype=first.dtype, device=device)
    for piece, tensor in zip(rows_of(made, list(map(len, tensors))), tensors, strict=True):
        copy_into(piece, tensor, non_blocking=True)
    return made


def joined(parameters: list[Tensor]) -> Tensor | None:
    """One view, (sum of rows, ...), over tensors that lie one after the other in one storage, else None."""
    first = parameters[0]
    storage = first.untyped_storage().data_ptr()
    offset = first.storage_offset()
    for parameter in parameters:
        beside = parameter.untyped_storage().data_ptr() == storage and parameter.storage_offset() == offset
        if not beside or parameter.dtype != first.dtype or not parameter.is_contiguous():
            return None
        offset += parameter.numel()
    rows = sum(parameter.shape[0] for parameter in parameters)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def in_memory_format(weight: Tensor, memory_format: torch.memory_format) -> Tensor:
    """A convolution's weight, (out, in, height, width), in a memory format: a new tensor. Where the card is full, the
    values are rewritten within the storage that they have, by way of main memory."""
    try:
        return copy_of(weight, memory_format)
    except torch.cuda.OutOfMemoryError:
        in_main_memory = torch.empty(weight.shape, dtype=weight.dtype, device="cpu", memory_format=memory_format)
        copy_into(in_main_memory, weight)
        target = weight.detach().as_strided(weight.shape, in_main_memory.stride())
        return copy_into(target, in_main_memory)

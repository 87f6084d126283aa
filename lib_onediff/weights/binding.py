"""Bind a host's parameters to a layout: which layers are fused, and which views over the parameters our forward reads.

A binding keeps no tensor. The host's parameters own their storage (after fusing: a few share one storage), every call
reads them anew, and a fused weight is a new view over its members. So an edit in place is seen at once, and an unloaded
model's memory is freed at once.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..core.layer_weights import LayerWeights, Weights
from ..core.leaves import Convolution, FusedLinear
from ..core.refusal import Refusal
from .exact_copy import copy_of
from .host_layers import HostLayers
from .joining import fuse, in_memory_format, in_one, joined, lies_away, mend, shares_storage
from .stored import StoredReader, StoredWeight, are_multiplied_alike

BOUND_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The dtypes of weights that a host casts at each use.
STORED_DTYPES = (*BOUND_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
MAIN_MEMORY = torch.device("cpu")
NOWHERE = torch.device("meta")


class Binding:
    """The parameters of one network, grouped as its layout says.

    layers: the host's layers that have them.
    fusions: the fused layers whose members lie in one tensor.
    groups: the paths of the layers that share a tensor, by its name: the members of a fused layer by the fused layer's
        name, every other layer alone by its path.
    apart: the paths of the members of fused layers that cannot lie in one tensor, by the fused layer's name: some are
        in few bits, and their values differ in dtype or are not stored row by row. Each is a group of its own.
    fusion_of: by the path of a fused layer's member: the fused layer's name, the member's first row in it, and the
        number of its rows.
    cast_to: the dtype to which the host casts parameters at each use; None if it computes with them as they are stored.
    device: the device that computes.
    away: the names of the groups of which a parameter is in main memory and not on the device.

    A layer in few bits is one whose weight the host's file stores in 4 or 8 bits (weights/stored.py). Such a weight is
    grouped and returned as its stored values, a plain tensor of any dtype; decoded() decodes it.
    """

    def __init__(self, module: nn.Module, layout: Any, reader: StoredReader | None = None) -> None:
        """layout: the module's, a core.family.Layout. reader: of the host's weights in few bits; None if it has
        none."""
        self.layout = layout
        leaves = layout.leaves()
        self.layers = HostLayers(module, leaves, reader)
        self._every_fusion = tuple(layout.fusions())
        self.fusions = self._every_fusion
        self._convolution_paths = [leaf.path for leaf in leaves if isinstance(leaf, Convolution) and leaf.kernel > 1]
        self._channels_last: set[str] = set()
        self.cast_to: torch.dtype | None = None
        self.apart: dict[str, list[str]] = {}
        self.fusion_of: dict[str, tuple[str, int, int]] = {}
        self.groups: dict[str, list[str]] = {}
        self.look_for_stored()
        self.device = self._first_weight().device
        self.away: frozenset[str] = frozenset()

    def follow(self, module: nn.Module, layout: Any) -> bool:
        """Go on with this binding after the module has changed. Returns False, and changes nothing, if it needs a new
        one: the layout is another one, or a layer was replaced. layout: the module's as it is now."""
        if layout != self.layout or not self.layers.follow(module):
            return False
        self.layout = layout
        return True

    def bind(self, channels_last: bool = False, device: torch.device | None = None) -> int:
        """Join the members of every fused layer that is not away in one storage, and lay out the convolutions' weights
        in channels-last order or torch's usual one. Parameters that already lie so are left as they are. device: the
        device that computes from now on; None: that of the first layer.

        Returns the bytes that were copied. Parameters are re-pointed (Parameter.data), never written: a host may keep
        the old storage as its backup. Raises Refusal if the parameters are of a dtype that we do not run, or lie on
        other devices than this one and main memory.
        """
        self.device = self._first_weight().device if device is None else device
        self.look_for_stored()
        self.refuse_mixture()
        for parameter in self.layers.parameters():
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
        """Undo bind(): give every parameter a storage of its own again, and every convolution that we laid out
        channels-last its usual memory format. If the GPU has no memory for that, parameters go on sharing a storage."""
        self.restore_memory_formats()
        for layer in self.layers.alive():
            for parameter in self.layers.tensors_of(layer):
                if shares_storage(parameter):
                    # If the GPU is full, it goes on sharing: the host can compute with that as well.
                    with (
                        suppress(torch.cuda.OutOfMemoryError), torch.no_grad(),
                        torch.inference_mode(parameter.is_inference()),
                    ):
                        parameter.data = copy_of(parameter)

    def restore_memory_formats(self) -> int:
        """Put the convolutions' weights that we have laid out channels-last back into torch's usual memory format;
        others may be channels-last by the host's choice. Returns the bytes copied."""
        copied = sum(self._set_memory_format(path, torch.contiguous_format) for path in list(self._channels_last))
        self._channels_last.clear()
        return copied

    def _set_memory_format(self, path: str, memory_format: torch.memory_format) -> int:
        """Lay a convolution's weight out in a memory format, and note that we did. Returns the bytes copied: 0 if the
        weight has this format already, is in few bits, or was unloaded."""
        if path in self.layers.formats or not self.layers.is_alive(path):
            return 0
        weight, _ = self.layers.weight_and_bias(path)
        if weight.is_contiguous(memory_format=memory_format):
            return 0
        with torch.no_grad(), torch.inference_mode(weight.is_inference()):
            weight.data = in_memory_format(weight, memory_format)
        self._channels_last.add(path)
        return weight.numel() * weight.element_size()

    def look_for_stored(self) -> None:
        """Read anew which weights are in few bits, and group the layers. Members of a fused layer are apart if one has
        a format that is not stored row by row, or if their values have several dtypes. Raises Refusal if a format is
        unknown."""
        stored = self.layers.read_formats()
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
        self.groups = {path: [path] for path in self.layers.paths() if path not in self.fusion_of}
        self.groups |= {fusion.name: [member.path for member in fusion.members] for fusion in self.fusions}

    def _can_lie_together(self, paths: Sequence[str], stored: Mapping[str, StoredWeight]) -> bool:
        """Whether the weights of layers can be rows of one tensor. stored: those in few bits, by path."""
        if stored.keys().isdisjoint(paths):
            return True
        if not all(stored[path].format.is_by_rows for path in paths if path in stored):
            return False
        return len({self.layers.weight_and_bias(path)[0].dtype for path in paths}) == 1

    def products(self) -> dict[str, list[str]]:
        """For each matrix product of our forward, the paths of the layers that it computes, by the layer's name. As
        groups, but each fused layer of apart is one product: its operand is joined at each use."""
        apart = {path for paths in self.apart.values() for path in paths}
        return {name: paths for name, paths in self.groups.items() if name not in apart} | self.apart

    def decoded_layers(self) -> list[nn.Module]:
        """The layers that the host multiplies in eight bits and our forward decodes, because layers over the same input
        are stored in another way. The comparison with the host makes it decode them as well (HostTraits.yardstick).
        Drop the result after the call. Raises Refusal if a layer was unloaded."""
        found: list[nn.Module] = []
        for paths in self.products().values():
            formats = {path: self.layers.formats[path][0] for path in paths if path in self.layers.formats}
            if not are_multiplied_alike(map(formats.get, paths)):
                found += [self.layers.module(path) for path, one in formats.items() if one.kind is not None]
        return found

    def shapes(self) -> Weights:
        """As weights(), but a weight in few bits is a tensor of its decoded shape without values, and the layers of
        apart have a copy of their biases, joined. From these, AppliedFunctions learns shapes and changes biases."""
        found = dict(self.weights())
        for name, paths in self.apart.items():
            biases = [bias for path in paths if (bias := self.layers.weight_and_bias(path)[1]) is not None]
            found[name] = found[name]._replace(bias=in_one(biases, self.device) if biases else None)
        for name, paths in self.products().items():
            for path in {name, *paths}:
                if not self.layers.formats.keys().isdisjoint(paths):
                    found[path] = found[path]._replace(weight=self._decoded_shape([path] if path in paths else paths))
        return found

    def _decoded_shape(self, paths: Sequence[str]) -> Tensor:
        """A tensor without values, of the shape of these layers' decoded weights one below the other, in dtype."""
        rows = sum(self.layers.shape(path)[0] for path in paths)
        return torch.empty((rows, *self.layers.shape(paths[0])[1:]), dtype=self.dtype, device=NOWHERE)

    def members(self, name: str) -> list[str]:
        """The paths of a fused layer's members in order; of another layer, its own."""
        return self.groups.get(name) or self.apart.get(name) or [name]

    def decoded(self, path: str, dtype: torch.dtype) -> Tensor | None:
        """The weight of a layer in few bits, decoded to this dtype on the device that computes. None for a layer whose
        weight is not stored in few bits."""
        stored = self.layers.stored(path)
        if stored is None:
            return None
        scales = [scale.to(self.device) for scale in stored.scales]
        return stored.decode(stored.values.to(self.device), scales, dtype)

    def parts(self, name: str) -> tuple[list[Tensor], list[Tensor]]:
        """The weights and the biases of a group's layers, in order."""
        weights: list[Tensor] = []
        biases: list[Tensor] = []
        for path in self.groups[name]:
            weight, bias = self.layers.weight_and_bias(path)
            weights.append(weight)
            if bias is not None:
                biases.append(bias)
        return weights, biases

    def holders(self, name: str) -> tuple[list[Tensor], list[Tensor]]:
        """As parts(), with StoredWeight.holder in the place of the values of weights in few bits: assigning to the data
        of these tensors moves the host's own weights."""
        weights, biases = self.parts(name)
        found: list[Tensor] = []
        for path, weight in zip(self.groups[name], weights, strict=True):
            stored = self.layers.stored(path)
            found.append(weight if stored is None else stored.holder)
        return found, biases

    def weights_on(self, device: torch.device, name: str) -> LayerWeights:
        """A group's weight and bias on a device: views of the host's parameters if all are there and lie together,
        otherwise joined copies. On the meta device, they have shapes and no values. The bias is None if no layer of the
        group has one."""
        found: list[Any] = []
        for parts in self.parts(name):
            there = joined(parts) if parts and all(part.device == device for part in parts) else None
            found.append(in_one(parts, device) if parts and there is None else there)
        return LayerWeights(*found)

    def weights(self) -> Weights:
        """Every layer's weight and bias by path, and every fused layer's by its name. Drop the result after the call.
        The fused layers in away and apart have a weight without values.

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
        """A fused layer's weight and bias, as views. Raises Refusal if its members no longer lie together."""
        weights, biases = self.parts(name)
        weight = joined(weights)
        bias = joined(biases) if biases else None
        if weight is None or (biases and (bias is None or len(biases) < len(weights))):
            raise Refusal(f"the layers of {name} no longer lie together")
        return LayerWeights(weight, bias)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the network computes in."""
        return self.cast_to or self.layers.dtype

    def _first_weight(self) -> Tensor:
        weight, _ = self.layers.weight_and_bias(self.layers.paths()[0])
        return weight

    def _layer_weights(self) -> dict[str, LayerWeights]:
        """The weight and bias of every layer, by path."""
        layers = self.layers
        return {path: LayerWeights(*layers.weight_and_bias(path)) for path in layers.paths()}

    def refuse_mixture(self) -> None:
        """Raise Refusal if the parameters are of a dtype that we do not run, or lie neither on the device nor in main
        memory. Weights that the host casts may have several dtypes, layer by layer."""
        known = BOUND_DTYPES if self.cast_to is None else STORED_DTYPES
        stored = self.layers.dtype
        layer_weights = self._layer_weights()
        for path, layer in layer_weights.items():
            for parameter in (layer.weight, layer.bias):
                if parameter is None:
                    continue
                if parameter is layer.weight and path in self.layers.formats:
                    self._refuse_elsewhere(path, parameter)
                    continue
                if not isinstance(parameter, nn.Parameter):
                    raise Refusal(
                        f"another tensor takes the place of a parameter of {path} (torch.func.functional_call?)"
                    )
                kind = type(parameter.data)
                if kind is not Tensor or parameter.dtype not in known:
                    found = str(parameter.dtype).removeprefix("torch.") if kind is Tensor else kind.__name__
                    raise Refusal(f"{path} is stored as {found}, which OneDiff does not run")
                self._refuse_elsewhere(path, parameter)
                if self.cast_to is None and parameter.dtype != stored and path not in self.layers.as_stored:
                    raise Refusal(f"its weights are of mixed types: {stored}, but {path} is {parameter.dtype}")
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
            raise Refusal("its weights are not loaded (they are on the meta device)")
        if parameter.device not in (self.device, MAIN_MEMORY):
            raise Refusal(f"the network computes on {self.device}, and {path} is on {parameter.device}")

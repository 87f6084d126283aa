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
from ..core.refusal import Refusal, unsupported_model
from .exact_copy import copy_of
from .host_layers import HostLayers
from .joining import fuse, in_memory_format, in_one, joined, lies_away, mend, shares_storage
from .stored import StoredReader, StoredWeight, are_multiplied_alike

# The dtypes that our forward computes in.
BOUND_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The dtypes of weights that a host casts at each use.
STORED_DTYPES = (*BOUND_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
MAIN_MEMORY = torch.device("cpu")
NOWHERE = torch.device("meta")


class Binding:
    """The parameters of one network, grouped as its layout says.

    Several linear layers that our forward computes as one, such as those of queries, keys and values, are a fused
    layer; they are its members. A layer is named by its path in the module, a fused layer has a name from the layout.

    layers: the host's layers that have the parameters.
    fusions: the fused layers whose members' weights are the rows of one tensor.
    groups: the paths of the layers whose weights are in one tensor, by a name: the members of a fused layer by the
        fused layer's name, and every other layer alone by its own path.
    apart: the fused layers whose members cannot be in one tensor: the members' paths by the fused layer's name. Some
        are in few bits, and their values differ in dtype or are not stored row by row. In groups, each member is alone.
    fusion_of: by the path of a fused layer's member: the fused layer's name, the member's first row in it, and the
        number of its rows.
    cast_to: the dtype to which the host casts parameters at each use; None if it computes with them as they are stored.
        BoundNetwork sets it at each refresh.
    device: the device that computes.
    away: the names of the groups with a parameter in main memory and not on the device. Streaming copies these.

    A layer in few bits is one whose weight the host's file stores in 4 or 8 bits (weights/stored.py). Such a weight is
    grouped and returned as its stored values, a plain tensor of any dtype; decoded() decodes it.
    """

    def __init__(self, module: nn.Module, layout: Any, reader: StoredReader | None = None) -> None:
        """Groups the layers, and moves nothing yet: see bind. layout: the module's, a core.family.Layout. reader: reads
        the host's weights in few bits; None for a host without such weights. Raises Refusal as look_for_stored."""
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
        """Go on with a module that was read again because it has changed; True if that is possible. Returns False, and
        changes nothing, if the module needs a new binding, because its layout differs or a layer was replaced. layout:
        the module's as it is now."""
        if layout != self.layout or not self.layers.follow(module):
            return False
        self.layout = layout
        return True

    def bind(self, channels_last: bool = False, device: torch.device | None = None) -> int:
        """Move weights to where our forward needs them: the members of every fused layer on the device into one
        storage, and the weights of convolutions larger than 1x1 into the memory format that it reads. Parameters that
        are there already stay. Also sets device and away, and reads anew which weights are in few bits.

        channels_last: lay these convolutions' weights out channels-last. False: put those that an earlier bind() has
            laid out back into torch's usual format; others stay as the host has them.
        device: the device that computes from now on; None: that of the first layer, where all weights must be.

        Returns the bytes that were copied. Parameters get another storage (Parameter.data), and no storage of the
        host's is written: it may keep the old one as its backup. Raises Refusal as look_for_stored and refuse_mixture,
        and with device None also if some parameters are in main memory while the first layer is on a GPU.
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
            raise Refusal("a part of the model's weights is in main memory, not on the GPU")
        copied = self._lay_out_channels_last() if channels_last else self.restore_memory_formats()
        for fusion in self.fusions:
            if fusion.name not in self.away:
                copied += sum(fuse(parts) for parts in self.parts(fusion.name) if parts)
        return copied

    def unbind(self) -> None:
        """Undo bind(): give every parameter a storage of its own again, and every convolution that we laid out
        channels-last its usual memory format. If the GPU has no memory for a copy, that parameter goes on sharing a
        storage, which the host can use as well."""
        self.restore_memory_formats()
        for layer in self.layers.alive():
            for parameter in self.layers.tensors_of(layer):
                if shares_storage(parameter):
                    with (
                        suppress(torch.cuda.OutOfMemoryError), torch.no_grad(),
                        torch.inference_mode(parameter.is_inference()),
                    ):
                        parameter.data = copy_of(parameter)

    def _lay_out_channels_last(self) -> int:
        """Lay the weights of the convolutions larger than 1x1 out channels-last, and note which were not so before, for
        restore_memory_formats. Returns the bytes copied."""
        copied = 0
        for path in self._convolution_paths:
            size = self._set_memory_format(path, torch.channels_last)
            if size:
                self._channels_last.add(path)
            copied += size
        return copied

    def restore_memory_formats(self) -> int:
        """Put the convolutions' weights that we have laid out channels-last back into torch's usual memory format.
        Weights that are channels-last by the host's choice stay. Returns the bytes copied."""
        copied = sum(self._set_memory_format(path, torch.contiguous_format) for path in list(self._channels_last))
        self._channels_last.clear()
        return copied

    def _set_memory_format(self, path: str, memory_format: torch.memory_format) -> int:
        """Lay the weight of the convolution at this path out in a memory format. Returns the bytes copied. Does nothing
        and returns 0 if the weight has this format already, is in few bits, or was unloaded."""
        if path in self.layers.formats or not self.layers.is_alive(path):
            return 0
        weight, _ = self.layers.weight_and_bias(path)
        if weight.is_contiguous(memory_format=memory_format):
            return 0
        with torch.no_grad(), torch.inference_mode(weight.is_inference()):
            weight.data = in_memory_format(weight, memory_format)
        return weight.numel() * weight.element_size()

    def look_for_stored(self) -> None:
        """Read anew which weights are in few bits, and set fusions, apart, fusion_of and groups accordingly. Raises
        Refusal if a format is unknown."""
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
        """Whether the weights of the layers at these paths can be rows of one tensor. True if none is in few bits.
        Otherwise the stored values of all layers must have one dtype, and every format must be stored row by row.
        stored: the weights in few bits, by path."""
        if stored.keys().isdisjoint(paths):
            return True
        if not all(stored[path].format.is_by_rows for path in paths if path in stored):
            return False
        return len({self.layers.weight_and_bias(path)[0].dtype for path in paths}) == 1

    def products(self) -> dict[str, list[str]]:
        """The paths of the layers that each matrix product of our forward computes, by the name of the layer or fused
        layer. These are the groups, except that a fused layer of apart is one product in place of its members: its
        operand is joined at each use."""
        apart = {path for paths in self.apart.values() for path in paths}
        return {name: paths for name, paths in self.groups.items() if name not in apart} | self.apart

    def decoded_layers(self) -> list[nn.Module]:
        """The host's layers that it multiplies in eight bits and that our forward decodes instead, because other
        members of the same fused layer are stored in another way. When outputs are compared, the host is made to decode
        them too (HostTraits.yardstick). Do not keep the result: it keeps the layers alive. Raises Refusal if a layer
        was unloaded."""
        found: list[nn.Module] = []
        for paths in self.products().values():
            formats = {path: self.layers.formats[path][0] for path in paths if path in self.layers.formats}
            if not are_multiplied_alike(map(formats.get, paths)):
                found += [self.layers.module(path) for path, one in formats.items() if one.kind is not None]
        return found

    def shapes(self) -> Weights:
        """As weights(), with two differences: a weight in few bits is a tensor on the meta device with the shape and
        dtype of the decoded weight, and a fused layer of apart has its members' biases, joined to a copy.
        AppliedFunctions takes shapes from these, and applies functions to these biases. Raises Refusal as weights()."""
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
        """A tensor on the meta device, of the shape of these layers' decoded weights one below the other, in the dtype
        that the network computes in."""
        rows = sum(self.layers.shape(path)[0] for path in paths)
        return torch.empty((rows, *self.layers.shape(paths[0])[1:]), dtype=self.dtype, device=NOWHERE)

    def members(self, name: str) -> list[str]:
        """The paths of a fused layer's members in order. For any other name, a list of this name alone."""
        return self.groups.get(name) or self.apart.get(name) or [name]

    def decoded(self, path: str, dtype: torch.dtype) -> Tensor | None:
        """The weight of the layer at this path, decoded from few bits to a new tensor of this dtype on the device that
        computes. None for a layer whose weight is not in few bits."""
        stored = self.layers.stored(path)
        if stored is None:
            return None
        scales = [scale.to(self.device) for scale in stored.scales]
        return stored.decode(stored.values.to(self.device), scales, dtype)

    def parts(self, name: str) -> tuple[list[Tensor], list[Tensor]]:
        """(weights, biases) of the layers of the group of this name, in order: the host's own tensors. Layers without a
        bias are left out of the biases. KeyError for a name that is not in groups, such as those in apart."""
        weights: list[Tensor] = []
        biases: list[Tensor] = []
        for path in self.groups[name]:
            weight, bias = self.layers.weight_and_bias(path)
            weights.append(weight)
            if bias is not None:
                biases.append(bias)
        return weights, biases

    def holders(self, name: str) -> tuple[list[Tensor], list[Tensor]]:
        """As parts(), but for weights in few bits the tensors that hold them for the host (StoredWeight.holder).
        Assigning to the data of any of these tensors moves the host's own weights to another memory."""
        weights, biases = self.parts(name)
        found: list[Tensor] = []
        for path, weight in zip(self.groups[name], weights, strict=True):
            stored = self.layers.stored(path)
            found.append(weight if stored is None else stored.holder)
        return found, biases

    def weights_on(self, device: torch.device, name: str) -> LayerWeights:
        """The weight and bias of the group of this name on a device: views of the host's parameters if these are on it
        already, in one storage, otherwise copies, joined. On the meta device, they have shapes and no values. The bias
        is None if no layer of the group has one. KeyError for a name that is not in groups, such as those in apart."""
        found: list[Any] = []
        for parts in self.parts(name):
            there = joined(parts) if parts and all(part.device == device for part in parts) else None
            found.append(in_one(parts, device) if parts and there is None else there)
        return LayerWeights(*found)

    def weights(self) -> Weights:
        """Every layer's weight and bias by path, and every fused layer's by its name: the host's tensors, and views of
        them. Do not keep the result after the call: it keeps the memory of an unloaded model alive. The fused layers in
        away and apart have a weight on the meta device, without values. A fused layer in away has such a bias too, and
        one in apart has the bias None; see shapes().

        Raises Refusal if a layer was unloaded, or if a fused layer's members are no longer in one storage: then bind
        again.
        """
        layer_weights = self._layer_weights()
        for fusion in self.fusions:
            is_away = fusion.name in self.away
            layer_weights[fusion.name] = self.weights_on(NOWHERE, fusion.name) if is_away else self._joined(fusion.name)
        for name, paths in self.apart.items():
            layer_weights[name] = LayerWeights(self._decoded_shape(paths), None)
        return layer_weights

    def _joined(self, name: str) -> LayerWeights:
        """The weight and bias of the fused layer of this name, as views of its members' storage. Raises Refusal if
        these are no longer in one storage."""
        weights, biases = self.parts(name)
        weight = joined(weights)
        bias = joined(biases) if biases else None
        if weight is None or (biases and (bias is None or len(biases) < len(weights))):
            raise Refusal(f"the weights of {name} have moved in memory since OneDiff prepared them")
        return LayerWeights(weight, bias)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the network computes in: cast_to, or HostLayers.dtype if the host casts nothing."""
        return self.cast_to or self.layers.dtype

    def _first_weight(self) -> Tensor:
        """The weight of the first layer, whose device is that of a network that nothing has moved."""
        weight, _ = self.layers.weight_and_bias(self.layers.paths()[0])
        return weight

    def _layer_weights(self) -> dict[str, LayerWeights]:
        """The weight and bias of every layer, by path; without fused layers."""
        layers = self.layers
        return {path: LayerWeights(*layers.weight_and_bias(path)) for path in layers.paths()}

    def refuse_mixture(self) -> None:
        """Raise Refusal, with the reason, if our forward cannot read the parameters: because of their dtypes, if one is
        neither on the device nor in main memory, if one was replaced by a tensor that is no Parameter, if only some
        members of a fused layer have a bias, or if a layer was unloaded.

        Weights that the host casts may have several of STORED_DTYPES, but one within a fused layer; other weights have
        one of BOUND_DTYPES, the same in all layers except HostLayers.as_stored. Weights in few bits may have any dtype.
        """
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
                        f"an extension or a script has replaced a parameter of {path} by another tensor "
                        "(torch.func.functional_call?)"
                    )
                kind = type(parameter.data)
                if kind is not Tensor or parameter.dtype not in known:
                    found = str(parameter.dtype).removeprefix("torch.") if kind is Tensor else kind.__name__
                    raise unsupported_model(f"its layer {path} is stored as {found}")
                self._refuse_elsewhere(path, parameter)
                if self.cast_to is None and parameter.dtype != stored and path not in self.layers.as_stored:
                    mixture = f"{stored}, but {path} is {parameter.dtype}"
                    raise unsupported_model(f"its weights are of mixed types: {mixture}")
        for fusion in self._every_fusion:
            members = [layer_weights[member.path] for member in fusion.members]
            biases = [layer.bias for layer in members if layer.bias is not None]
            has_one_type = fusion.name in self.apart or len({layer.weight.dtype for layer in members}) == 1
            if not has_one_type or len({bias.dtype for bias in biases}) > 1:
                raise unsupported_model(f"the layers of {fusion.name} are stored in several types")
            if len({layer.bias is None for layer in members}) > 1:
                raise unsupported_model(f"only some layers of {fusion.name} have a bias")

    def _refuse_elsewhere(self, path: str, parameter: Tensor) -> None:
        """Raise Refusal for a parameter that is neither on the device that computes nor in main memory."""
        if parameter.is_meta:
            raise Refusal("the model's weights are not loaded (they are on PyTorch's meta device)")
        if parameter.device not in (self.device, MAIN_MEMORY):
            raise Refusal(f"the model computes on {self.device}, and its layer {path} is on {parameter.device}")

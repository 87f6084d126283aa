"""Reads the weights that Forge Neo stores in 4 or 8 bits: comfy-kitchen's quantized tensors, and GGUF.

In Neo 2.26, the weight of a layer of a mixed-precision file is a `QuantizedTensor`. It has no memory of its own: its
values are in `_qdata`; its scales, and the dtype and shape of the decoded weight, in `_params`; the name of its layout
in `_layout_cls`. The weight of a layer of a GGUF file is a parameter of bytes, with the functions of its type in
`gguf_cls` and the shape of the decoded weight in `real_shape`.
"""
from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ...core.attempt import attempted
from ...core.refusal import Refusal
from ...weights.low_bit import FP8, INT8, Kind
from ...weights.scan import APPLIED_AT_CALL
from ...weights.stored import Decode, Format, StoredWeight

# The class of comfy-kitchen's tensors, and its Python module.
QUANTIZED = "QuantizedTensor"
QUANTIZED_MODULE = "comfy_kitchen.tensor.base"
# The name of the layout in INT8; and the names of FP8 formats for users, by the dtype of the stored values.
INT8_LAYOUT = "TensorWiseINT8Layout"
FP8_LAYOUTS = {torch.float8_e4m3fn: "FP8 (e4m3, scaled)", torch.float8_e5m2: "FP8 (e5m2, scaled)"}
# By layout: the fields of _params that are tensors, which are the weight's scales. Any other layout is refused.
SCALES = {
    INT8_LAYOUT: ("scale",),
    "TensorCoreFP8Layout": ("scale",),
    "TensorCoreFP8E4M3Layout": ("scale",),
    "TensorCoreFP8E5M2Layout": ("scale",),
    "TensorCoreMXFP8Layout": ("scale",),
    "TensorCoreNVFP4Layout": ("scale", "block_scale"),
}
# The names of all fields in SCALES.
TENSORS = frozenset(name for names in SCALES.values() for name in names)
# The layouts with a scale for each block of a row, by their names for users.
NAMES = {"TensorCoreMXFP8Layout": "MXFP8", "TensorCoreNVFP4Layout": "NVFP4"}
# The qualified names of the classes of layers with such weights. They cast any weight to the dtype of their input at
# each use.
ALWAYS_CAST = (
    "mixed_precision_ops.<locals>.MixedPrecisionOps.Linear", "ForgeOperationsGGUF.Linear", "ForgeOperationsGGUF.Conv2d",
)
# Values of a network's storage_dtype that mean weights in few bits.
STORED_TYPES = (torch.int8, torch.uint8, "gguf")
# An attribute of a layer: if it is True, the layer decodes its weight before it multiplies. A layer in INT8 ignores it:
# it multiplies integers, unless a function is applied to its weight.
DECODES_FIRST = "_full_precision_mm"
# The attribute of a layer with the functions that the host applies to its weight.
WEIGHT_FUNCTION, *_ = APPLIED_AT_CALL
# In decoding_first: the previous value of an attribute that was not set.
ABSENT = object()
# bitsandbytes' class of 4-bit parameters, and Forge's, which is derived from it.
FOUR_BITS = ("Params4bit", "ForgeParams4bit")
# The end of a refusal's sentence on a format.
UNSUPPORTED = "which OneDiff does not support"
# The width of the input in rounds_any_input: a multiple of the block size of every format.
BLOCK = 256
log = logging.getLogger("onediff")
# Returns (the name of the layout, the _params) of a QuantizedTensor.
read_layout = attrgetter("_layout_cls", "_params")


class StoredWeights:
    """Reads the weights that Forge Neo stores in few bits, for networks of one class; a weights.stored.StoredReader."""

    def __init__(self, unrounded: tuple[str, ...] = ()) -> None:
        """unrounded: parts of the paths of layers whose inputs have more than three dimensions. If such a layer's
        weight is in FP8, Neo 2.26 decodes it; Neo 2.29 rounds the input to FP8, as for all other layers."""
        self._unrounded = unrounded
        self._rounds_all: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()

    def weight(self, layer: nn.Module, path: str) -> StoredWeight | None:
        """A layer's weight as a StoredWeight; None if the weight is an ordinary parameter, or the layer has none.
        Raises Refusal for a format that OneDiff does not support. path: the layer's, in its network. See
        StoredReader."""
        weight: Any = layer._parameters.get("weight")
        if is_quantized(weight):
            return quantized_weight(layer, weight, self._rounds(layer, path))
        if getattr(weight, "gguf_cls", None) is not None:
            return gguf_weight(weight)
        refuse_unsupported(layer, weight)
        return None

    def _rounds(self, layer: nn.Module, path: str) -> bool:
        """Whether the host rounds the inputs of this layer to FP8, supposing that its weight is in FP8 and the GPU
        multiplies in FP8. path: the layer's, in its network."""
        if not any(part in path for part in self._unrounded):
            return True
        kind = type(layer)
        if kind not in self._rounds_all:
            self._rounds_all[kind] = rounds_any_input(kind)
        return self._rounds_all[kind]

    def tensors(self, layers: Sequence[nn.Module]) -> list[Tensor]:
        """All tensors that these layers compute with (parameters, stored values, scales), as plain tensors over the
        host's memory, in the order of the layers. Runs at every call of a network. See StoredReader."""
        found: list[Tensor] = []
        for layer in layers:
            parameters: Any = layer._parameters
            for parameter in parameters.values():
                kind = type(parameter)
                # The most frequent case comes first, because this runs at every call.
                if kind is nn.Parameter:
                    found.append(parameter)
                elif kind.__qualname__ == QUANTIZED:
                    params = parameter._params
                    found.append(parameter._qdata)
                    for name in SCALES.get(parameter._layout_cls, ()):
                        found.append(getattr(params, name))
                elif parameter is not None:
                    found.append(parameter)
        return found

    def facts(self, layers: Sequence[nn.Module]) -> list[object]:
        """Plain data that is equal as long as the format and shape of each stored weight of these layers stay the same.
        Layers with ordinary parameters add nothing. Runs at every call of a network. See StoredReader."""
        found: list[object] = []
        for layer in layers:
            weight: Any = layer._parameters.get("weight")
            kind = type(weight)
            if kind is nn.Parameter:
                continue
            if kind.__qualname__ == QUANTIZED:
                found.append((layer.__dict__.get(DECODES_FIRST), weight._layout_cls, plain_fields(weight._params)))
            elif hasattr(weight, "gguf_cls"):
                found.append((weight.gguf_cls, tuple(weight.real_shape), weight.computation_dtype))
        return found


def decoding_first(
    host: Callable[[], Tensor], network: nn.Module, decoded: Sequence[nn.Module]
) -> Callable[[], Tensor]:
    """The host's forward (host) of a network, wrapped so that layers in float8 and 4 bits decode their weights while
    the forward runs, instead of rounding their inputs. On a GPU that does not multiply in these formats, the host
    always decodes. Afterwards, the layers are as before. `host` itself if there is no layer to change.

    decoded: layers in INT8 that shall decode their weights too. The host decodes the weight of a layer with a function
        on its weight, so each of these layers gets the function `unchanged`.
    """
    changes: list[tuple[nn.Module, str, object]] = [
        (layer, DECODES_FIRST, True) for layer in network.modules() if vars(layer).get(DECODES_FIRST) is False
    ]
    changes += [(layer, WEIGHT_FUNCTION, [unchanged]) for layer in decoded if not vars(layer).get(WEIGHT_FUNCTION)]
    if not changes:
        return host

    def decoding() -> Tensor:
        before = [(vars(layer), name, vars(layer).get(name, ABSENT)) for layer, name, _ in changes]
        for layer, name, value in changes:
            vars(layer)[name] = value
        try:
            return host()
        finally:
            for state, name, own in before:
                state.pop(name)
                if own is not ABSENT:
                    state[name] = own

    return decoding


def unchanged(weight: Tensor) -> Tensor:
    """The weight itself. As an entry of a layer's weight_function, this makes the host decode an INT8 weight before it
    multiplies; see decoding_first."""
    return weight


class ProbeLayer:
    """A fake layer in FP8, on which rounds_any_input calls the forward of a host's class of layers to find out whether
    the forward rounds its input. A forward that rounds reads input_scale first; any other forward reads weight. Reading
    either attribute ends the forward by a Refusal, before anything is computed.

    has_rounded: whether the forward has read input_scale.
    """

    quant_format = "float8_e4m3fn"
    layout_type = "TensorCoreFP8E4M3Layout"
    weight_function = bias_function = ()
    _full_precision_mm = False

    def __init__(self) -> None:
        self.has_rounded = False

    @property
    def input_scale(self) -> Tensor:
        """Notes that the forward rounds its input, and raises Refusal to end it."""
        self.has_rounded = True
        raise Refusal("the input is rounded")

    @property
    def weight(self) -> Tensor:
        """Raises Refusal to end a forward that does not round its input."""
        raise Refusal("the input is not rounded")


def rounds_any_input(kind: Any) -> bool:
    """Whether the forward of this class of layers rounds inputs of more than three dimensions to FP8. Calls the forward
    on a ProbeLayer. False if the forward fails in any other way. A wrong result cannot spoil an image, because a
    network's first output is compared with the host's."""
    layer = ProbeLayer()
    x = torch.zeros((1, 1, 1, 1, BLOCK), dtype=torch.float32, device="cpu")
    tried = attempted(lambda: kind.forward(layer, x))
    log.debug("%s rounds inputs of five dimensions: %s (%s)", kind, layer.has_rounded, tried.reason)
    return layer.has_rounded


def refuse_unsupported(layer: nn.Module, weight: Any) -> None:
    """Raise Refusal for a layer's weight in bitsandbytes' 4 bits, or in INT8 of a Forge Neo before 2.26: known formats
    that OneDiff does not support. Any other weight is accepted, and so is None."""
    if type(weight).__name__ in FOUR_BITS:
        raise Refusal(f"the weights are stored in {getattr(weight, 'quant_type', 'nf4')} (bitsandbytes), {UNSUPPORTED}")
    if vars(layer).get("_is_quantized") and getattr(weight, "dtype", None) == torch.int8:
        raise Refusal(f"the INT8 weights were loaded by a Forge Neo before 2.26, {UNSUPPORTED}: update the WebUI")


def is_quantized(parameter: Any) -> bool:
    """Whether a parameter is one of comfy-kitchen's quantized tensors, by its class's name; False for None."""
    return type(parameter).__qualname__ == QUANTIZED


def plain_fields(params: Any) -> tuple[object, ...]:
    """The values of the fields of a QuantizedTensor's _params (params), in their order, without the fields in TENSORS:
    plain data to compare formats by."""
    kind: Any = type(params)
    found: tuple[object, ...] = plain_reader(kind)(params)
    return found


@functools.cache
def plain_reader(kind: type) -> attrgetter[Any]:
    """A function that returns the plain_fields of objects of this dataclass. kind: the dataclass, which must have at
    least two fields that are not in TENSORS, as all of the host's have."""
    return attrgetter(*(field.name for field in fields(kind) if field.name not in TENSORS))


def quantized_weight(layer: nn.Module, weight: Any, rounds_to_float8: bool) -> StoredWeight:
    """A layer's QuantizedTensor (weight) as a StoredWeight, over the same memory. Raises Refusal for a layout that
    OneDiff does not support, for a transposed tensor, for missing scales or a wrong number of them, and for another
    package's class of the same name.

    rounds_to_float8: whether the host rounds the layer's inputs if the weight is in FP8.
    """
    if type(weight).__module__ != QUANTIZED_MODULE:
        raise Refusal(f"the weights are a {type(weight).__module__}.{QUANTIZED}, {UNSUPPORTED}")
    layout, params = read_layout(weight)
    names = SCALES.get(layout)
    if names is None:
        in_file = vars(layer).get("quant_format")
        label = f"{in_file} ({layout})" if isinstance(in_file, str) else layout
        raise Refusal(f"the weights are stored as {label}, {UNSUPPORTED}")
    if getattr(params, "transposed", False):
        raise Refusal(f"the weights are stored as {layout} and transposed, {UNSUPPORTED}")
    scales = tuple(getattr(params, name) for name in names)
    values: Tensor = weight._qdata
    name, kind, rotation = described(layout, values.dtype, params)
    if not all(isinstance(scale, Tensor) for scale in scales):
        raise Refusal(
            f"the checkpoint file seems damaged: a weight in {name} lacks its scale (the factor that decodes it), so "
            "the WebUI's image may be wrong too; download the file again"
        )
    if kind == FP8 and (layer.__dict__.get(DECODES_FIRST) or not rounds_to_float8):
        kind = None
    shape = tuple(params.orig_shape)
    if kind is not None and scales[0].numel() not in (1, shape[0]):
        raise Refusal(
            f"the checkpoint file seems damaged: a layer in {name} has {scales[0].numel()} scales for {shape[0]} rows, "
            "so the WebUI's image may be wrong too; download the file again"
        )
    format = Format(name, (layout, *plain_fields(params)), kind, rotation, is_by_rows=layout not in NAMES)
    return StoredWeight(format, shape, values, scales, decoder(weight.layout_cls, params, names), values)


def described(layout: str, dtype: torch.dtype, params: Any) -> tuple[str, Kind | None, int]:
    """(name, kind, rotation) of a quantized tensor's format: the format's name for users; the eight-bit type in which
    the host multiplies, None if it decodes first; the group size of ConvRot's rotation, 0 without a rotation. See
    weights.stored.Format.

    layout: the name of the tensor's layout. dtype: of the stored values. params: the tensor's _params.
    """
    if layout == INT8_LAYOUT:
        rotation = int(params.convrot_groupsize) if params.convrot else 0
        return "INT8 (ConvRot)" if rotation else "INT8", INT8, rotation
    if layout in NAMES:
        return NAMES[layout], None, 0
    return FP8_LAYOUTS.get(dtype, "FP8"), FP8 if dtype == FP8.dtype else None, 0


def decoder(layout: Any, params: Any, names: Sequence[str]) -> Decode:
    """A function decode(values, scales, dtype) that returns the decoded weight in dtype, by the host's own code for
    this layout; a weights.stored.Decode. layout: the layout's class. params: the tensor's _params. names: the fields of
    params that are scales, in the order in which decode gets them."""

    def decode(values: Tensor, scales: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        own = replace(params, orig_dtype=dtype, **dict(zip(names, scales, strict=True)))
        full: Tensor = layout.dequantize(values.contiguous(), own)
        rows, width = params.orig_shape
        # The host pads rows and columns to multiples of the layout's block.
        return full[:rows, :width]

    return decode


def gguf_weight(weight: Any) -> StoredWeight:
    """A parameter of a GGUF file as a StoredWeight, over the same memory. The host prepares such a parameter when it
    loads the file, and then sets its flag `baked`. Raises Refusal if the flag is not set."""
    name = f"GGUF {weight.gguf_cls.__name__}"
    if not getattr(weight, "baked", False):
        raise Refusal(f"the WebUI has not finished loading a weight stored as {name}: load the checkpoint again")

    def decode(values: Tensor, scales: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        decoded: Tensor = weight.gguf_cls.dequantize_pytorch(weight.copy_with_data(values))
        return decoded.to(dtype)

    return StoredWeight(Format(name, (name,)), tuple(weight.real_shape), weight.data, (), decode, weight)

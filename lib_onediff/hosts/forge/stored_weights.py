"""The weights that Forge Neo keeps in few bits: comfy-kitchen's quantized tensors, and GGUF.

In Neo 2.26 a layer of a mixed-precision file has a `QuantizedTensor` as its parameter, a tensor without memory of its
own around `_qdata`, `_params` (scales, the decoded type and shape) and the name of its layout. A layer of a GGUF file
has a parameter of bytes, `gguf_cls` with the functions of its type, and `real_shape`.
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

QUANTIZED, ITS_MODULE = "QuantizedTensor", "comfy_kitchen.tensor.base"
INT8_LAYOUT = "TensorWiseINT8Layout"
FP8_LAYOUTS = {torch.float8_e4m3fn: "FP8 (e4m3, scaled)", torch.float8_e5m2: "FP8 (e5m2, scaled)"}
# The fields of a layout's parameters that are tensors: a weight's scales.
SCALES = {
    INT8_LAYOUT: ("scale",),
    "TensorCoreFP8Layout": ("scale",),
    "TensorCoreFP8E4M3Layout": ("scale",),
    "TensorCoreFP8E5M2Layout": ("scale",),
    "TensorCoreMXFP8Layout": ("scale",),
    "TensorCoreNVFP4Layout": ("scale", "block_scale"),
}
TENSORS = frozenset(name for names in SCALES.values() for name in names)
NAMES = {"TensorCoreMXFP8Layout": "MXFP8", "TensorCoreNVFP4Layout": "NVFP4"}
# The classes of layers that hold such weights, by their qualified names: whatever is in them, they cast it to the type
# of their input at each use.
ALWAYS_CAST = (
    "mixed_precision_ops.<locals>.MixedPrecisionOps.Linear", "ForgeOperationsGGUF.Linear", "ForgeOperationsGGUF.Conv2d",
)
# The types by which a network says that it is stored so.
STORED_TYPES = (torch.int8, torch.uint8, "gguf")
# What a layer holds beside tensors that decides how a quantized tensor is computed with: the host decodes it first, but
# for INT8, which multiplies integers wherever no function is on the weight.
DECODES_FIRST = "_full_precision_mm"
WEIGHT_FUNCTION, *_ = APPLIED_AT_CALL
ABSENT = object()
# Classes of parameters by bitsandbytes, and by hosts that derive from them.
FOUR_BITS = ("Params4bit", "ForgeParams4bit")
UNKNOWN = "which OneDiff does not know"
# So many numbers any format stores.
BLOCK = 256
log = logging.getLogger("onediff")
read_layout = attrgetter("_layout_cls", "_params")


class StoredWeights:
    """weights.stored.StoredReader for Forge Neo."""

    def __init__(self, unrounded: tuple[str, ...] = ()) -> None:
        """unrounded: what the paths of layers contain whose inputs have more than three dimensions. Neo 2.26 rounds
        none such to FP8, and decodes the weight; 2.29 rounds all."""
        self._unrounded = unrounded
        self._rounds_all: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()

    def weight(self, layer: nn.Module, path: str) -> StoredWeight | None:
        weight: Any = layer._parameters.get("weight")
        if is_quantized(weight):
            return quantized_weight(layer, weight, self._rounds(layer, path))
        if getattr(weight, "gguf_cls", None) is not None:
            return gguf_weight(weight)
        refuse_known_formats(layer, weight)
        return None

    def _rounds(self, layer: nn.Module, path: str) -> bool:
        """Whether the host rounds the inputs of a layer in FP8, where the card has units for it."""
        if not any(part in path for part in self._unrounded):
            return True
        kind = type(layer)
        if kind not in self._rounds_all:
            self._rounds_all[kind] = rounds_any_input(kind)
        return self._rounds_all[kind]

    def tensors(self, layers: Sequence[nn.Module]) -> list[Tensor]:
        found: list[Tensor] = []
        for layer in layers:
            parameters: Any = layer._parameters
            for parameter in parameters.values():
                kind = type(parameter)
                # The most frequent case first: this runs at every call.
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
    """The host's forward without the rounding of what layers in float8 and in 4 bits read: they decode their weights,
    as on a card that has no units for the format. decoded: layers in INT8 that do so, too, as they do for any function
    on their weight."""
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
    return weight


class StandIn:
    """Stands for a host's layer in FP8 until its forward reads the weight. A forward that rounds its input reads the
    input's scale before. has_rounded: whether that was read."""

    quant_format = "float8_e4m3fn"
    layout_type = "TensorCoreFP8E4M3Layout"
    weight_function = bias_function = ()
    _full_precision_mm = False

    def __init__(self) -> None:
        self.has_rounded = False

    @property
    def input_scale(self) -> Tensor:
        self.has_rounded = True
        raise Refusal("the input is rounded")

    @property
    def weight(self) -> Tensor:
        raise Refusal("the input is not rounded")


def rounds_any_input(kind: Any) -> bool:
    """Whether the forward of this class of layers rounds inputs of more than three dimensions to FP8. False where it
    does not say: its first call is compared with the host's."""
    layer = StandIn()
    x = torch.zeros((1, 1, 1, 1, BLOCK), dtype=torch.float32, device="cpu")
    tried = attempted(lambda: kind.forward(layer, x))
    log.debug("%s rounds inputs of five dimensions: %s (%s)", kind, layer.has_rounded, tried.reason)
    return layer.has_rounded


def refuse_known_formats(layer: nn.Module, weight: Any) -> None:
    """Raise Refusal for a weight in few bits that is no tensor of the kinds above."""
    if type(weight).__name__ in FOUR_BITS:
        raise Refusal(f"its weights are stored in {getattr(weight, 'quant_type', 'nf4')} (bitsandbytes), {UNKNOWN}")
    if vars(layer).get("_is_quantized") and getattr(weight, "dtype", None) == torch.int8:
        raise Refusal(f"its weights are stored in INT8 by operations of an earlier Forge Neo, {UNKNOWN}")


def is_quantized(parameter: Any) -> bool:
    """Whether a parameter is one of comfy-kitchen's quantized tensors."""
    return type(parameter).__qualname__ == QUANTIZED


def plain_fields(params: Any) -> tuple[object, ...]:
    """The fields of a layout's parameters that are no tensors."""
    kind: Any = type(params)
    found: tuple[object, ...] = plain_reader(kind)(params)
    return found


@functools.cache
def plain_reader(kind: type) -> attrgetter[Any]:
    """Reads these fields of a class of parameters, two or more."""
    return attrgetter(*(field.name for field in fields(kind) if field.name not in TENSORS))


def quantized_weight(layer: nn.Module, weight: Any, rounds_to_float8: bool) -> StoredWeight:
    """A quantized tensor. rounds_to_float8: whether the host rounds the layer's inputs, where a card has units for FP8.
    Raises Refusal for a layout that is not known, or a tensor that was transposed."""
    if type(weight).__module__ != ITS_MODULE:
        raise Refusal(f"its weights are a {type(weight).__module__}.{QUANTIZED}, {UNKNOWN}")
    layout, params = read_layout(weight)
    names = SCALES.get(layout)
    if names is None:
        in_file = vars(layer).get("quant_format")
        told = f"{in_file} ({layout})" if isinstance(in_file, str) else layout
        raise Refusal(f"its weights are stored as {told}, {UNKNOWN}")
    if getattr(params, "transposed", False):
        raise Refusal(f"its weights are stored as {layout} and transposed, {UNKNOWN}")
    scales = tuple(getattr(params, name) for name in names)
    if not all(isinstance(scale, Tensor) for scale in scales):
        raise Refusal(f"a weight stored as {layout} lacks its scale")
    values: Tensor = weight._qdata
    name, kind, rotation = named(layout, values.dtype, params)
    if kind == FP8 and (layer.__dict__.get(DECODES_FIRST) or not rounds_to_float8):
        kind = None
    shape = tuple(params.orig_shape)
    if kind is not None and scales[0].numel() not in (1, shape[0]):
        raise Refusal(f"a weight stored as {name} has {scales[0].numel()} scales for {shape[0]} rows")
    format = Format(name, (layout, *plain_fields(params)), kind, rotation, is_by_rows=layout not in NAMES)
    return StoredWeight(format, shape, values, scales, decoder(weight.layout_cls, params, names), values)


def named(layout: str, dtype: torch.dtype, params: Any) -> tuple[str, Kind | None, int]:
    """What users call a layout, the eight-bit type in which the host multiplies it, and the width of its rotation."""
    if layout == INT8_LAYOUT:
        rotation = int(params.convrot_groupsize) if params.convrot else 0
        return "INT8 (ConvRot)" if rotation else "INT8", INT8, rotation
    if layout in NAMES:
        return NAMES[layout], None, 0
    return FP8_LAYOUTS.get(dtype, "FP8"), FP8 if dtype == FP8.dtype else None, 0


def decoder(layout: Any, params: Any, names: Sequence[str]) -> Decode:
    """The host's function that decodes values of this layout."""

    def decode(values: Tensor, scales: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        own = replace(params, orig_dtype=dtype, **dict(zip(names, scales, strict=True)))
        full: Tensor = layout.dequantize(values.contiguous(), own)
        rows, width = params.orig_shape
        # What is not a multiple of the layout's block was padded.
        return full[:rows, :width]

    return decode


def gguf_weight(weight: Any) -> StoredWeight:
    """A weight of a GGUF file, which the host has made ready ("baked") as it was loaded. Raises Refusal for another."""
    name = f"GGUF {weight.gguf_cls.__name__}"
    if not getattr(weight, "baked", False):
        raise Refusal(f"a weight stored as {name} is not made ready by the WebUI")

    def decode(values: Tensor, scales: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        decoded: Tensor = weight.gguf_cls.dequantize_pytorch(weight.copy_with_data(values))
        return decoded.to(dtype)

    return StoredWeight(Format(name, (name,)), tuple(weight.real_shape), weight.data, (), decode, weight)

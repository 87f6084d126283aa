"""Quantized tensors: their values, the parameters that decode them, and the name of their layout."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten
INT8_MOST, SMALLEST_SCALE = 127.0, 1e-30
# The absolute values of a 4-bit float.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Params:
    """The parameters with which a layout decodes its stored numbers. scale: multiplies them. orig_dtype, orig_shape:
    those of the decoded tensor."""

    scale: Any
    orig_dtype: torch.dtype
    orig_shape: tuple[int, ...]

    def each(self, change: Callable[[Tensor], Tensor]) -> Any:
        """A copy in which each tensor is replaced by change(tensor)."""
        tensors = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return dataclasses.replace(self, **tensors)


@dataclass(frozen=True)
class BlockParams(Params):
    transposed: bool = False


@dataclass(frozen=True)
class INT8Params(Params):
    is_weight: bool = True
    convrot: bool = False
    convrot_groupsize: int = 256
    transposed: bool = False


@dataclass(frozen=True)
class NVFP4Params(Params):
    block_scale: Any = None
    transposed: bool = False


class TensorWiseINT8Layout:
    """INT8 with one scale for the tensor, or one for each row. A product quantizes each row of its input to INT8
    too."""

    Params = INT8Params

    @classmethod
    def quantize(
        cls, tensor: Tensor, scale: Any = None, per_channel: bool = False, convrot: bool = False, group: int = 256
    ) -> Any:
        turned = rotated(tensor.float(), group) if convrot else tensor.float()
        largest = turned.abs().amax(dim=1, keepdim=True) if per_channel else turned.abs().amax()
        scale = (largest / INT8_MOST).clamp_min(SMALLEST_SCALE)
        params = INT8Params(scale, tensor.dtype, tuple(tensor.shape), convrot=convrot, convrot_groupsize=group)
        return in_integers(turned, scale), params

    @classmethod
    def again(cls, params: INT8Params) -> dict[str, Any]:
        """The options with which quantize() makes a tensor of the same kind as the one with these parameters."""
        return {
            "per_channel": params.scale.dim() > 0, "convrot": params.convrot, "group": params.convrot_groupsize,
        }

    @classmethod
    def dequantize(cls, numbers: Tensor, params: INT8Params) -> Tensor:
        decoded = numbers.float() * params.scale
        return (rotated(decoded, params.convrot_groupsize) if params.convrot else decoded).to(params.orig_dtype)

    @classmethod
    def linear(cls, rows: Tensor, weight: QuantizedTensor, bias: Any) -> Tensor:
        params = weight._params
        if params.transposed:
            return functional.linear(rows, weight.dequantize(), bias)
        if params.scale.numel() not in (1, len(weight._qdata)):
            raise ValueError("one scale for all rows, or one for each")
        turned = rotated(rows, params.convrot_groupsize) if params.convrot else rows
        scale = (turned.abs().amax(dim=-1, keepdim=True).float() / INT8_MOST).clamp_min(SMALLEST_SCALE)
        sums = in_integers(turned, scale.to(rows.dtype)).double() @ weight._qdata.double().t()
        made = (sums.float() * (scale * params.scale.reshape(1, -1))).to(rows.dtype)
        return made if bias is None else made + bias


class TensorCoreFP8Layout:
    """Float8 with one scale for the tensor. In a float8 product, the input is such a tensor as well."""

    Params = Params
    dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn

    @classmethod
    def quantize(cls, tensor: Tensor, scale: Any = None) -> Any:
        most = torch.finfo(cls.dtype).max
        if isinstance(scale, str):
            scale = tensor.abs().amax().float() / most
        scale = torch.ones((), device=tensor.device) if scale is None else scale.float()
        numbers = (tensor.float() / scale).clamp(-most, most).to(cls.dtype)
        return numbers, Params(scale, tensor.dtype, tuple(tensor.shape))

    @classmethod
    def again(cls, params: Params) -> dict[str, Any]:
        return {}

    @classmethod
    def dequantize(cls, numbers: Tensor, params: Params) -> Tensor:
        return numbers.to(params.orig_dtype) * params.scale.to(params.orig_dtype)

    @classmethod
    def linear(cls, rows: Any, weight: QuantizedTensor, bias: Any) -> Tensor:
        rows = rows.dequantize() if isinstance(rows, QuantizedTensor) else rows
        return functional.linear(rows, weight.dequantize(), bias)


class TensorCoreFP8E4M3Layout(TensorCoreFP8Layout):
    pass


class TensorCoreFP8E5M2Layout(TensorCoreFP8Layout):
    dtype = torch.float8_e5m2


class TensorCoreMXFP8Layout(TensorCoreFP8Layout):
    """Float8 with a power of two as the scale of each block of 32 numbers. Both sizes are padded to whole blocks."""

    Params = BlockParams
    block = 32

    @classmethod
    def quantize(cls, tensor: Tensor, scale: Any = None) -> Any:
        blocks = padded(tensor.float(), cls.block).unflatten(1, (-1, cls.block))
        exponents = blocks.abs().amax(dim=-1, keepdim=True).clamp_min(2.0**-60).log2().floor() - 8
        numbers = (blocks / exponents.exp2()).clamp(-448, 448).to(cls.dtype).flatten(1)
        # The exponents are stored with an offset, so that they are not negative.
        stored = (exponents + 127).squeeze(-1).to(torch.uint8)
        return numbers, BlockParams(stored, tensor.dtype, tuple(tensor.shape))

    @classmethod
    def dequantize(cls, numbers: Tensor, params: Any) -> Tensor:
        powers = (params.scale.float() - 127).exp2()
        return (numbers.float().unflatten(1, (-1, cls.block)) * powers[..., None]).flatten(1).to(params.orig_dtype)


class TensorCoreNVFP4Layout(TensorCoreMXFP8Layout):
    """Two 4-bit floats in each byte. Each block of 16 numbers has a float8 scale; a scale of the tensor multiplies
    these."""

    Params = NVFP4Params
    block = 16

    @classmethod
    def quantize(cls, tensor: Tensor, scale: Any = None) -> Any:
        scale = tensor.float().abs().amax() / (448 * E2M1[-1])
        blocks = padded(tensor.float(), cls.block).unflatten(1, (-1, cls.block))
        block_scale = (blocks.abs().amax(dim=-1) / (E2M1[-1] * scale)).to(torch.float8_e4m3fn)
        steps = (blocks / (block_scale.float() * scale).clamp_min(SMALLEST_SCALE)[..., None]).flatten(1)
        magnitudes = (steps.abs()[..., None] - torch.tensor(E2M1)).abs().argmin(dim=-1)
        halves = (magnitudes + 8 * (steps < 0)).to(torch.uint8)
        numbers = halves[:, ::2] * 16 + halves[:, 1::2]
        return numbers, NVFP4Params(scale, tensor.dtype, tuple(tensor.shape), block_scale)

    @classmethod
    def dequantize(cls, numbers: Tensor, params: Any) -> Tensor:
        halves = torch.stack([numbers // 16, numbers % 16], dim=-1).flatten(1).long()
        steps = torch.tensor(E2M1)[halves % 8] * torch.where(halves < 8, 1.0, -1.0)
        scales = (params.block_scale.float() * params.scale)[..., None]
        return (steps.unflatten(1, (-1, cls.block)) * scales).flatten(1).to(params.orig_dtype)


LAYOUTS = {kind.__name__: kind for kind in (
    TensorWiseINT8Layout, TensorCoreFP8Layout, TensorCoreFP8E4M3Layout, TensorCoreFP8E5M2Layout, TensorCoreMXFP8Layout,
    TensorCoreNVFP4Layout,
)}


def in_integers(numbers: Tensor, scale: Tensor) -> Tensor:
    return (numbers / scale).round().clamp(-INT8_MOST - 1, INT8_MOST).to(torch.int8)


def rotated(rows: Tensor, group: int) -> Tensor:
    """ConvRot: multiply each group of a row's numbers by an orthogonal, symmetric Hadamard matrix."""
    if rows.shape[-1] % group:
        raise ValueError(f"groups of {group} do not divide {rows.shape[-1]}")
    four = 1.0 - 2.0 * torch.eye(4).flip(0)
    signs = torch.ones(1, 1)
    while len(signs) < group:
        signs = torch.kron(signs, four)
    turned = rows.float().unflatten(-1, (-1, group)) @ (signs / len(signs) ** 0.5)
    return turned.flatten(-2).to(rows.dtype)


def padded(matrix: Tensor, block: int) -> Tensor:
    return functional.pad(matrix, (0, -matrix.shape[1] % block, 0, -matrix.shape[0] % block))


def decoded(value: Any) -> Any:
    """The arguments of a torch function with each quantized tensor decoded."""
    if isinstance(value, QuantizedTensor):
        return value.dequantize()
    return type(value)(map(decoded, value)) if isinstance(value, (list, tuple)) else value


class QuantizedTensor(Tensor):
    """A tensor with the shape and dtype of the decoded numbers, over the stored ones (_qdata) and their parameters."""

    _qdata: Tensor
    _layout_cls: str
    _params: Any

    @staticmethod
    def __new__(cls: Any, qdata: Tensor, layout_cls: str, params: Any) -> Any:
        return Tensor._make_wrapper_subclass(cls, params.orig_shape, dtype=params.orig_dtype, device=qdata.device)

    def __init__(self, qdata: Tensor, layout_cls: str, params: Any) -> None:
        self._qdata = qdata
        self._layout_cls = layout_cls
        self._params = params

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantizedTensor({self._layout_cls}, {tuple(self.shape)})"

    @classmethod
    def from_float(cls, tensor: Tensor, layout_cls: str, **given: Any) -> Any:
        numbers, params = LAYOUTS[layout_cls].quantize(tensor, **given)
        return cls(numbers, layout_cls, params)

    def requantize_from_float(self, tensor: Tensor, **given: Any) -> Any:
        return self.from_float(tensor, self._layout_cls, **{**self.layout_cls.again(self._params), **given})

    @property
    def layout_cls(self) -> Any:
        return LAYOUTS[self._layout_cls]

    def data_ptr(self) -> int:
        return self._qdata.data_ptr()

    def dequantize(self) -> Tensor:
        rows, width = self._params.orig_shape
        whole = self.layout_cls.dequantize(self._qdata, self._params)
        return whole.t()[:rows, :width] if getattr(self._params, "transposed", False) else whole[:rows, :width]

    def _with(self, numbers: Tensor, params: Any) -> Any:
        return QuantizedTensor(numbers, self._layout_cls, params)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        # Handled here, before autograd decomposes the operator.
        if function.__name__ == "linear" and isinstance(given[1], QuantizedTensor):
            return given[1].layout_cls.linear(*given, *(named or {}).values())
        with torch._C.DisableTorchFunctionSubclass():
            return function(*given, **(named or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        one, named = given[0], named or {}
        if not isinstance(one, QuantizedTensor):
            return function(*decoded(given), **named)
        if function is aten.detach.default:
            return one._with(one._qdata.detach(), one._params.each(Tensor.clone))
        if function is aten.clone.default:
            return one._with(one._qdata.clone(), one._params.each(Tensor.clone))
        if function.overloadpacket in (aten._to_copy, aten.to):
            dtypes = [value for value in (*given, *named.values()) if isinstance(value, torch.dtype)]
            device = named.get("device")
            if function.overloadpacket is aten.to and dtypes in ([], [one.dtype]) and device in (None, one.device):
                return one
            moved = one._params.each(lambda tensor: tensor.clone().to(device))
            params = dataclasses.replace(moved, orig_dtype=dtypes[0] if dtypes else one.dtype)
            return one._with(one._qdata.to(device), params)
        if function is aten.t.default and hasattr(one._params, "transposed"):
            params = one._params
            turned = dataclasses.replace(params, orig_shape=params.orig_shape[::-1], transposed=not params.transposed)
            return one._with(one._qdata, turned)
        return function(*decoded(given), **named)

"""Neo's layers for checkpoint files in which each layer may be stored in a different format."""
from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from backend.operations import ForgeOperations
from comfy_kitchen.tensor.base import QuantizedTensor
from torch import Tensor, nn
from torch.nn import functional

# By the format's name in a file: the name of its layout, and whether the layer rounds its input.
FORMATS = {
    "float8_e4m3fn": ("TensorCoreFP8E4M3Layout", True), "float8_e5m2": ("TensorCoreFP8E5M2Layout", True),
    "mxfp8": ("TensorCoreMXFP8Layout", True), "nvfp4": ("TensorCoreNVFP4Layout", True),
    "int8_tensorwise": ("TensorWiseINT8Layout", False),
}


def mixed_precision_ops(disabled: Collection[str] = (), dimensions: int = 3) -> Any:
    """A namespace of layer classes.

    disabled: formats in which the GPU cannot multiply. Layers with such weights decode them, and do not quantize their
        inputs.
    dimensions: inputs with more dimensions are not quantized. Later releases have no limit.
    """

    class MixedPrecisionOps(ForgeOperations):
        class Linear(nn.Module):
            weight_function: Any = ()
            bias_function: Any = ()

            def read(self, quant_format: str, **options: Any) -> None:
                """Quantize the weight, as if it had been read from a file in this format. options: arguments of the
                layout's quantize()."""
                self.quant_format = quant_format
                self.layout_type = FORMATS[quant_format][0]
                self._full_precision_mm = quant_format in disabled
                weight = QuantizedTensor.from_float(self.weight.detach(), self.layout_type, **options)
                self.weight = nn.Parameter(weight, requires_grad=False)

            def forward(self, input: Tensor) -> Tensor:
                layout, rows = getattr(self, "layout_type", None), input
                has_functions = len(self.weight_function) or len(self.bias_function)
                is_rounded = layout is not None and FORMATS[self.quant_format][1]
                if is_rounded and not self._full_precision_mm and not has_functions and input.dim() <= dimensions:
                    flat = input.flatten(0, -2)
                    rows = QuantizedTensor.from_float(flat, layout, scale=getattr(self, "input_scale", None))
                output = functional.linear(rows, *self._parameters_for(input))
                return output.unflatten(0, input.shape[:-1]) if rows is not input else output

            def _parameters_for(self, input: Tensor) -> list[Any]:
                found: list[Any] = []
                for parameter, functions in ((self.weight, self.weight_function), (self.bias, self.bias_function)):
                    if parameter is not None:
                        if len(functions) and isinstance(parameter, QuantizedTensor):
                            parameter = parameter.dequantize()
                        parameter = parameter.to(input.dtype)
                        for function in functions:
                            parameter = function(parameter)
                    found.append(parameter)
                return found

            def convert_weight(self, weight: Any) -> Tensor:
                """The plain weight into which a LoRA is merged."""
                return weight.dequantize() if isinstance(weight, QuantizedTensor) else weight

            def set_weight(self, weight: Tensor) -> Tensor:
                """A merged weight, quantized in the format of this layer."""
                own: Any = self.weight
                if not isinstance(own, QuantizedTensor):
                    return weight.to(own.dtype)
                return own.requantize_from_float(weight, scale="recalculate").to(own.dtype)

    return MixedPrecisionOps


def torch_dtype_of(quant_format: str) -> torch.dtype:
    """The storage_dtype of a network with weights in this format."""
    named = {"int8_tensorwise": torch.int8, "nvfp4": torch.uint8, "float8_e5m2": torch.float8_e5m2}
    return named.get(quant_format, torch.float8_e4m3fn)

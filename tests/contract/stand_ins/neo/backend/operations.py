"""Neo's layers, made of Forge's source. Linear is an nn.Linear, layers have lists of functions that are applied to
weight and bias (weight_function, bias_function), and there is an RMSNorm. Also the Linear for GGUF files."""
from __future__ import annotations

from typing import Any

import torch
from backend.operations_gguf import ParameterGGUF, dequantize_tensor
from stand_in_engine import code_of

RMS_NORM = """    class RMSNorm(torch.nn.RMSNorm):
        bias = None
        add = False

        def forward(self, x: Tensor) -> Tensor:
            weight = parameters_of(self, x)[0]
            return functional.rms_norm(x, self.normalized_shape, weight + 1.0 if self.add else weight, self.eps)

"""
code_of(
    "forge/backend/operations.py", globals(), ("Linear(torch.nn.Module)", "Linear(torch.nn.Linear)"),
    ("    class LayerNorm", f"{RMS_NORM}    class LayerNorm"),
    ("        def forward", "        weight_function = bias_function = ()\n\n        def forward"),
)


class ForgeOperationsGGUF(ForgeOperations):  # noqa: F821
    class Linear(torch.nn.Module):
        weight_function: Any = ()
        bias_function: Any = ()

        def read(self, kind: Any) -> None:
            """Convert the present weight to a GGUF format, as if it had been loaded from a GGUF file. kind: a format of
            operations_gguf; None for a plain float16 tensor."""
            plain = self.weight.detach()
            data = plain.half() if kind is None else kind.bytes_of(plain)
            self.weight = ParameterGGUF(data, kind, plain.shape)
            if kind is not None:
                kind.bake(self.weight)

        def forward(self, x: Any) -> Any:
            if self.bias is not None and self.bias.dtype != x.dtype:
                self.bias = torch.nn.Parameter(dequantize_tensor(self.bias).to(x.dtype), requires_grad=False)
            if self.weight.dtype != x.dtype and getattr(self.weight, "gguf_cls", None) is None:
                self.weight = torch.nn.Parameter(self.weight.data.to(x.dtype), requires_grad=False)
            weight, bias = dequantize_tensor(self.weight).to(x.dtype), self.bias
            for function in self.weight_function:
                weight = function(weight)
            for function in self.bias_function:
                bias = function(bias)
            return torch.nn.functional.linear(x, weight, bias)

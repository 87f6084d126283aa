"""Neo's parameters of GGUF files: bytes in blocks of 32 numbers, and the classes that decode them."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 32


class Q8_0:
    """A format whose block is a scale in float16 and 32 bytes."""

    dtype, most = torch.int8, 127.0

    @classmethod
    def bytes_of(cls, weight: Tensor) -> Tensor:
        blocks = weight.float().reshape(-1, BLOCK)
        scale = (blocks.abs().amax(dim=1, keepdim=True) / cls.most).half()
        numbers = (blocks / scale.float().clamp_min(1e-7)).round().clamp(-cls.most, cls.most).to(torch.int8)
        return torch.cat([scale.view(torch.int8), numbers], dim=1).view(cls.dtype)

    @classmethod
    def bake(cls, parameter: Any) -> None:
        """Prepare the bytes for decoding, once: cast the scales to computation_dtype."""
        if not parameter.baked:
            rows = parameter.data.view(torch.int8)
            scale = rows[:, :2].contiguous().view(torch.float16).to(parameter.computation_dtype).view(torch.int8)
            parameter.data = torch.cat([scale, rows[:, 2:]], dim=1).view(cls.dtype)
            parameter.baked = True

    @classmethod
    def dequantize_pytorch(cls, parameter: Any) -> Tensor:
        if not parameter.baked:
            raise ValueError("not baked")
        rows = parameter.data.view(torch.int8)
        scale = rows[:, :2].contiguous().view(parameter.computation_dtype)
        return (rows[:, 2:] * scale).view(parameter.shape)


class Q4_K(Q8_0):
    """A coarser format, in bytes of another dtype."""

    dtype, most = torch.uint8, 7.0


class ParameterGGUF(nn.Parameter):
    """The bytes of a GGUF tensor. gguf_cls: the class that decodes them; None for a plain tensor. real_shape: the shape
    of the decoded tensor."""

    gguf_cls: Any
    real_shape: Any
    computation_dtype: torch.dtype
    baked: bool

    def __new__(cls, data: Tensor, gguf_cls: Any = None, real_shape: Any = None) -> Any:
        made = super().__new__(cls, data, requires_grad=False)
        made.gguf_cls, made.real_shape = gguf_cls, data.shape if real_shape is None else real_shape
        made.computation_dtype, made.baked = torch.float16, False
        return made

    @property
    def shape(self) -> Any:
        return self.real_shape

    def copy_with_data(self, data: Tensor) -> Any:
        made: Any = ParameterGGUF(data)
        made.__dict__.update(self.__dict__)
        return made

    def to(self, *given: Any, **named: Any) -> Any:
        return self.copy_with_data(self.data.to(*given, **named))


def dequantize_tensor(tensor: Any) -> Any:
    kind = getattr(tensor, "gguf_cls", None)
    return tensor if kind is None else kind.dequantize_pytorch(tensor)

"""The operators in OneFlow, for its lazy graphs: every tensor here is one of OneFlow's. Importing this imports OneFlow.

OneFlow 0.9.0 has no group norm for the CPU, no circular padding and no attention but a fused one for NVIDIA GPUs; what
is missing is written out.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import oneflow as flow
import oneflow.nn.functional as functional
import torch
from oneflow import Tensor
from oneflow.utils.tensor import from_torch

from ...model.layout import Convolution, GroupNorm, LayerNorm, TimeEmbedding
from ...model.operators import Stream
from ...model.weights import Affine
from ...ops import torch_ops


class OneFlowOperators:
    """See model.operators.Operators. Images are contiguous. fused_attention: see gate.Verdict."""

    def __init__(self, fused_attention: bool = False) -> None:
        self._fused_attention = fused_attention

    # These are operators of tensors alone, whosoever they are.
    materialize = staticmethod(torch_ops.materialize)
    residual_add = staticmethod(torch_ops.residual_add)
    image_to_tokens = staticmethod(torch_ops.image_to_tokens)
    silu = staticmethod(functional.silu)

    def sinusoids(self, timestep: Tensor, time: TimeEmbedding) -> Tensor:
        # torch's own frequencies: what two libraries differ by here, a timestep of 1000 makes a thousand times larger.
        frequencies = from_torch(torch_ops.frequencies(time, torch.device("cpu"))).to(timestep.device)
        angles = timestep.unsqueeze(1).to(flow.float32) * frequencies.unsqueeze(0) * time.scale
        waves = [flow.cos(angles), flow.sin(angles)]
        return flow.cat(waves if time.cosine_first else waves[::-1], dim=-1)

    def join(self, vectors: Sequence[Tensor]) -> Tensor:
        return flow.cat(list(vectors), dim=0)

    def linear(self, x: Tensor, affine: Affine) -> Tensor:
        weight = affine.weight
        return functional.linear(x, weight.flatten(1) if weight.dim() == 4 else weight, affine.bias)

    def pointwise(self, image: Tensor, affine: Affine) -> Tensor:
        weight = affine.weight
        weight = weight if weight.dim() == 4 else weight.reshape(*weight.shape, 1, 1)
        return functional.conv2d(image, weight, affine.bias)

    def convolution(self, image: Tensor, affine: Affine, shape: Convolution) -> Tensor:
        if shape.circular:
            image = wrap(wrap(image, shape.padding, 3), shape.padding, 2)
            return functional.conv2d(image, affine.weight, affine.bias, shape.stride)
        return functional.conv2d(image, affine.weight, affine.bias, shape.stride, shape.padding)

    def group_norm(
        self, image: Tensor, affine: Affine, norm: GroupNorm, silu: bool, shift: Tensor | None = None,
        reader: Affine | None = None,
    ) -> Tensor:
        if shift is not None:
            image = image + shift.reshape(*shift.shape, 1, 1)
        if image.is_cuda:
            normed = flow._C.group_norm(image, affine.weight, affine.bias, True, norm.groups, norm.eps)
        else:
            assert affine.bias is not None, "every group norm of a UNet has a bias"
            groups = image.reshape(image.shape[0], norm.groups, -1)
            groups = functional.layer_norm(groups, (groups.shape[-1],), None, None, norm.eps)
            weight, bias = (vector.reshape(1, norm.channels, 1, 1) for vector in (affine.weight, affine.bias))
            normed = groups.reshape(*image.shape) * weight + bias
        return functional.silu(normed) if silu else normed

    def layer_norm(
        self, stream: Stream, affine: Affine, norm: LayerNorm, reader: Affine
    ) -> tuple[Stream, Tensor]:
        tokens = self.materialize(stream)
        return Stream(tokens), functional.layer_norm(tokens, (norm.width,), affine.weight, affine.bias, norm.eps)

    def add_linear(self, stream: Stream, x: Tensor, affine: Affine) -> Stream:
        return stream._replace(tokens=stream.tokens + self.linear(x, affine))

    def attention(self, query: Tensor, key: Tensor, value: Tensor, upcast: bool) -> Tensor:
        dtype, heads, width = query.dtype, query.shape[1], query.shape[3]
        if upcast:
            query, key, value = (part.to(flow.float32) for part in (query, key, value))
        elif self._fused_attention and dtype == flow.float16:
            rows = [part.transpose(1, 2).flatten(2) for part in (query, key, value)]
            mixed = flow._C.fused_multi_head_attention_inference(*rows, num_heads=heads)
            return mixed.reshape(*mixed.shape[:2], heads, width).transpose(1, 2)
        scores = flow.matmul(query * (1 / math.sqrt(width)), key.transpose(2, 3))
        return flow.matmul(flow.softmax(scores, dim=-1), value).to(dtype)

    def geglu(self, tokens: Tensor, reader: Affine) -> Tensor:
        value, gate = tokens.chunk(2, dim=-1)
        return value * functional.gelu(gate)

    def gated_linear(self, x: Tensor, affine: Affine, reader: Affine) -> Tensor:
        return self.geglu(self.linear(x, affine), reader)

    def concatenate(self, image: Tensor, skip: Tensor) -> Tensor:
        return flow.cat([image, skip], dim=1)

    def resize(self, image: Tensor, height: int, width: int) -> Tensor:
        scales = height / image.shape[2], width / image.shape[3]
        # What functional.interpolate calls, which warns of its module in every graph.
        return flow._C.upsample_nearest_2d(
            image, height_scale=scales[0], width_scale=scales[1], output_size=[height, width],
            data_format="channels_first",
        )

    def tokens_to_image(self, tokens: Tensor, height: int, width: int) -> Tensor:
        return tokens.transpose(1, 2).reshape(tokens.shape[0], -1, height, width)


def wrap(image: Tensor, padding: int, dim: int) -> Tensor:
    """The image with so much of the opposite edge before and after it along a dimension."""
    size = image.shape[dim]
    return flow.cat([image.narrow(dim, size - padding, padding), image, image.narrow(dim, 0, padding)], dim=dim)

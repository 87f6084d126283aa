"""The operators for OneFlow's tensors, and OneFlow graphs of them. Importing this module imports OneFlow.

OneFlow 0.9.0 has no group norm on the CPU, no circular padding, and attention only as a fused kernel for some NVIDIA
GPUs: these are composed of other functions here.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import oneflow as flow
import oneflow.nn.functional as functional
import torch
from oneflow import Tensor, _oneflow_internal
from oneflow.utils.tensor import from_torch, to_torch

from ...core.layer_weights import LayerWeights, Weights
from ...core.leaves import Convolution, GroupNorm, LayerNorm, TimeEmbedding
from ...core.operators import Activation, Filled, GatedUnit, Heads, Modulation, Residual, WeightedNorm
from ..torch import operators as torch_ops

# The value of masked scores before the softmax: finite in float16, and far below any real score.
LOWEST = -60000.0


class OneFlowOperators:
    """Operators for OneFlow's tensors, as far as UNets need them. core.operators.Operators describes their arguments
    and results; arguments that only other backends need, such as consumer, are ignored. Images are contiguous. Layers
    have neither LoRAs nor 8-bit weights (OneFlow.refuse_call). Arguments that no UNet uses, such as a modulation, raise
    AssertionError."""

    # These functions only use methods that torch's and OneFlow's tensors have.
    materialize = staticmethod(torch_ops.materialize)
    residual_add = staticmethod(torch_ops.residual_add)
    image_to_tokens = staticmethod(torch_ops.image_to_tokens)
    silu = staticmethod(functional.silu)

    def sinusoids(self, timestep: Tensor, time: TimeEmbedding) -> Tensor:
        """Cosines and sines of the timestep at falling frequencies: (batch,) -> float32 (batch, channels)."""
        # torch's frequencies, because a timestep of 1000 multiplies a difference between the two libraries by 1000.
        frequencies = from_torch(torch_ops.frequencies(time, torch.device("cpu"))).to(timestep.device)
        angles = timestep.unsqueeze(1).to(flow.float32) * frequencies.unsqueeze(0) * time.scale
        waves = [flow.cos(angles), flow.sin(angles)]
        return flow.cat(waves if time.cosine_first else waves[::-1], dim=-1)

    def join(self, vectors: Sequence[Tensor]) -> Tensor:
        """Vectors concatenated to one."""
        return flow.cat(list(vectors), dim=0)

    def linear(self, x: Tensor, layer: LayerWeights) -> Tensor:
        """A linear layer: (..., in) -> (..., out). The weight may be a 1x1 convolution's, (out, in, 1, 1)."""
        weight = layer.weight
        return functional.linear(x, weight.flatten(1) if weight.dim() == 4 else weight, layer.bias)

    def pointwise(self, image: Tensor, layer: LayerWeights) -> Tensor:
        """A 1x1 convolution: (batch, in, h, w) -> (batch, out, h, w). The weight may be a linear layer's, (out, in)."""
        weight = layer.weight
        weight = weight if weight.dim() == 4 else weight.reshape(*weight.shape, 1, 1)
        return functional.conv2d(image, weight, layer.bias)

    def convolution(self, image: Tensor, layer: LayerWeights, shape: Convolution) -> Tensor:
        """A square 2D convolution, padded with zeros or, if shape.circular, with the opposite edge."""
        if shape.circular:
            image = wrap(wrap(image, shape.padding, 3), shape.padding, 2)
            return functional.conv2d(image, layer.weight, layer.bias, shape.stride)
        return functional.conv2d(image, layer.weight, layer.bias, shape.stride, shape.padding)

    def group_norm(
        self, image: Tensor, layer: LayerWeights, norm: GroupNorm, silu: bool, shift: Tensor | None = None,
        consumer: LayerWeights | None = None,
    ) -> Tensor:
        """The group norm of image + shift (batch, channels), followed by SiLU if silu. On the CPU, composed of a layer
        norm, because OneFlow has no group norm there."""
        if shift is not None:
            image = image + shift.reshape(*shift.shape, 1, 1)
        if image.is_cuda:
            normed = flow._C.group_norm(image, layer.weight, layer.bias, True, norm.groups, norm.eps)
        else:
            assert layer.bias is not None, "every group norm of a UNet has a bias"
            groups = image.reshape(image.shape[0], norm.groups, -1)
            groups = functional.layer_norm(groups, (groups.shape[-1],), None, None, norm.eps)
            weight, bias = (vector.reshape(1, norm.channels, 1, 1) for vector in (layer.weight, layer.bias))
            normed = groups.reshape(*image.shape) * weight + bias
        return functional.silu(normed) if silu else normed

    def residual_norm(
        self, residual: Residual, layer: LayerWeights, norm: LayerNorm, consumer: LayerWeights,
        modulation: Modulation | None = None,
    ) -> tuple[Residual, Tensor]:
        """(the residual, summed to plain tokens; its layer norm). norm: only layer norms. modulation must be None."""
        assert modulation is None, "no norm of a UNet is modulated"
        tokens = self.materialize(residual)
        return Residual(tokens), functional.layer_norm(tokens, (norm.width,), layer.weight, layer.bias, norm.eps)

    def split_heads(self, projected: Tensor, parts: Sequence[Heads]) -> list[Tensor]:
        """(batch, tokens, heads of all parts * head width) -> one (batch, heads, tokens, head width) for each part. The
        parts must have as many heads as each other, and neither norm nor rotation."""
        pieces = projected.chunk(len(parts), dim=-1)
        heads = []
        for piece, part in zip(pieces, parts, strict=True):
            assert part.norm is None and part.rotary is None, "no UNet has norms or rotations of heads"
            heads.append(piece.view(*piece.shape[:-1], part.number, -1).transpose(1, 2))
        return heads

    def add_linear(
        self, residual: Residual, x: Tensor, layer: LayerWeights, gate: Tensor | None = None,
        norm: WeightedNorm | None = None,
    ) -> Residual:
        """residual + linear(x, layer), added at once to new tokens. gate and norm must be None."""
        assert gate is None and norm is None, "no UNet adds layers with a gate or a norm"
        return residual._replace(tokens=residual.tokens + self.linear(x, layer))

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, upcast: bool, mask: Tensor | Filled | None = None
    ) -> Tensor:
        """Softmax attention, by two products and a softmax: query, key and value (batch, heads, tokens, head width) ->
        (batch, heads, tokens of query, head width). Keys may have fewer heads than queries. upcast, mask: see
        core.operators.Operators.attention, but mask must not be Filled."""
        assert not isinstance(mask, Filled), "no UNet has rows that are filled up"
        dtype, (batch, heads, queries, width) = query.dtype, query.shape
        if upcast:
            query, key, value = (part.to(flow.float32) for part in (query, key, value))
        key_heads = key.shape[1]
        if key_heads != heads:
            # Queries of several heads that share a head of keys are treated as more queries of one head.
            query = query.reshape(batch, key_heads, -1, width)
        scores = flow.matmul(query * (1 / math.sqrt(width)), key.transpose(2, 3))
        if mask is None:
            weights = flow.softmax(scores, dim=-1)
        else:
            hidden = flow.logical_not(mask.expand(batch, heads, queries, key.shape[2])).reshape(*scores.shape)
            # The second mask sets the weights of a query without any key to zero.
            weights = flow.softmax(scores.masked_fill(hidden, LOWEST), dim=-1).masked_fill(hidden, 0)
        mixed = flow.matmul(weights, value).to(dtype)
        return mixed if key_heads == heads else mixed.reshape(batch, heads, queries, -1)

    def gated(self, tokens: Tensor, unit: GatedUnit, consumer: LayerWeights) -> Tensor:
        """A gated linear unit: (..., 2 n) -> (..., n)."""
        value, gate = tokens.chunk(2, dim=-1)
        if unit.gate_first:
            value, gate = gate, value
        return value * activated(gate, unit.activation)

    def gated_linear(self, x: Tensor, layer: LayerWeights, unit: GatedUnit, consumer: LayerWeights) -> Tensor:
        """gated(linear(x, layer), unit): (..., in) -> (..., out / 2)."""
        return self.gated(self.linear(x, layer), unit, consumer)

    def activated_linear(
        self, x: Tensor, layer: LayerWeights, activation: Activation, consumer: LayerWeights
    ) -> Tensor:
        """activation(linear(x, layer)): (..., in) -> (..., out)."""
        return activated(self.linear(x, layer), activation)

    def concatenate(self, image: Tensor, skip: Tensor) -> Tensor:
        """image and skip, concatenated along the channels."""
        return flow.cat([image, skip], dim=1)

    def resize(self, image: Tensor, height: int, width: int) -> Tensor:
        """An image (batch, channels, h, w), resized to (height, width) by nearest neighbour as
        torch.nn.functional.interpolate defines it."""
        scales = height / image.shape[2], width / image.shape[3]
        # What functional.interpolate calls, which warns of its module in every graph.
        return flow._C.upsample_nearest_2d(
            image, height_scale=scales[0], width_scale=scales[1], output_size=[height, width],
            data_format="channels_first",
        )

    def tokens_to_image(self, tokens: Tensor, height: int, width: int) -> Tensor:
        """(batch, h * w, channels) -> (batch, channels, h, w), a contiguous copy."""
        return tokens.transpose(1, 2).reshape(tokens.shape[0], -1, height, width)


def activated(x: Tensor, activation: Activation) -> Tensor:
    """activation(x). Raises KeyError for an activation that this function does not list: a substitute would make a
    wrong image."""
    functions: dict[Activation, Callable[[Tensor], Tensor]] = {
        Activation.SILU: functional.silu,
        Activation.GELU: functional.gelu,
        Activation.GELU_TANH: partial(functional.gelu, approximate="tanh"),
        Activation.SIGMOID: flow.sigmoid,
    }
    return functions[activation](x)


def wrap(image: Tensor, padding: int, dim: int) -> Tensor:
    """The image, padded along a dimension on both sides by `padding` rows of its opposite edge."""
    size = image.shape[dim]
    return flow.cat([image.narrow(dim, size - padding, padding), image, image.narrow(dim, 0, padding)], dim=dim)


def graph_of(build: Callable[..., Any], weights: Weights) -> Any:
    """An nn.Graph of OneFlow that computes `build` with these weights, which are torch's tensors; run it by run_graph.
    Its first run compiles it. The weights are not copied, and the graph does not keep them alive: the caller must.

    build: build(weights, *inputs), with OneFlow's tensors, returns a tuple of outputs.
    """
    share: Callable[[Any], Any] = lambda part: None if part is None else from_torch(unowned(part))  # noqa: E731
    shared = {path: LayerWeights(share(layer.weight), share(layer.bias)) for path, layer in weights.items()}

    class UNetGraph(flow.nn.Graph):
        def build(self, *given: Any) -> Any:
            return build(shared, *given)

    return UNetGraph()


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor over the same memory as a contiguous tensor, which does not keep that memory alive. The caller must
    make sure that the memory exists whenever it is read."""
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, tensor.nbytes)
    empty: Any = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, 0, tensor.shape)


def run_graph(graph: Callable[..., Any], given: list[torch.Tensor]) -> list[torch.Tensor]:
    """A graph's outputs for these contiguous inputs, at least one, as new torch tensors. Waits until they are computed.
    """
    if given[0].is_cuda:
        # OneFlow launches on streams of its own, which are not ordered with torch's.
        torch.cuda.current_stream(given[0].device).synchronize()
    results = graph(*map(from_torch, given))
    # OneFlow's threads read the environment variables when they launch, so wait before the next call sets its own.
    _oneflow_internal.eager.Sync()
    return [to_torch(result) for result in results]

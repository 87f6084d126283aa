"""The layers of a UNet, computed with a set of operators: what happens inside a stage."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.additions import ImagePrompt, PerturbedAttention
from ...core.affine import Affine, Weights
from ...core.leaves import Convolution, CrossAttention, GroupNorm, SelfAttention, TransformerBlock
from ...core.operators import Image, Operators, Rows, Stream
from .layout import Downsample, ResidualBlock, SpatialTransformer, Stage, Upsample


@dataclass(frozen=True)
class Layers:
    """Everything that a stage needs besides its image.

    shifts: what each residual block adds after its first convolution, (batch, channels), by its projection's path.
    key_values: (batch, tokens, keys then values) of each cross attention, by the name of its fused layer.
    image_prompts, perturbed: see UNetCall.
    """

    weights: Weights
    ops: Operators
    shifts: Mapping[str, Tensor]
    key_values: Mapping[str, Tensor]
    upcast_attention: bool
    image_prompts: tuple[ImagePrompt, ...] = ()
    perturbed: PerturbedAttention | None = None

    def stage(self, stage: Stage, image: Tensor, following: Tensor | None) -> Tensor:
        """Run one stage. following: the skip that the next stage takes, whose size the image must end at."""
        for layer in stage:
            if isinstance(layer, ResidualBlock):
                image = self._residual_block(layer, image)
            elif isinstance(layer, SpatialTransformer):
                image = self._spatial_transformer(layer, image)
            elif isinstance(layer, Upsample):
                image = self._upsample(layer, image, following)
            else:
                shape: Convolution = layer.convolution if isinstance(layer, Downsample) else layer
                image = self.ops.convolution(image, self.weights[shape.path], shape)
        return image

    def norm(
        self, norm: GroupNorm, image: Image, shift: Tensor | None = None, reader: Affine | None = None
    ) -> Image:
        """Group norm of image + shift (batch, channels), and SiLU. reader: the convolution that it is for."""
        return self.ops.group_norm(image, self.weights[norm.path], norm, silu=True, shift=shift, reader=reader)

    def _upsample(self, layer: Upsample, image: Tensor, following: Tensor | None) -> Tensor:
        height, width = image.shape[-2] * 2, image.shape[-1] * 2
        if layer.resize_before and following is not None:
            height, width = following.shape[-2:]
        image = self.ops.resize(image, height, width)
        return self.ops.convolution(image, self.weights[layer.convolution.path], layer.convolution)

    def _residual_block(self, block: ResidualBlock, image: Tensor) -> Tensor:
        weights, ops = self.weights, self.ops
        into, out = weights[block.in_convolution.path]._replace(bias=None), weights[block.out_convolution.path]
        hidden = ops.convolution(self.norm(block.in_norm, image, None, into), into, block.in_convolution)
        hidden = self.norm(block.out_norm, hidden, self.shifts[block.embedding.path], out)
        hidden = ops.convolution(hidden, out._replace(bias=None), block.out_convolution)
        skip = image if block.skip is None else ops.pointwise(image, weights[block.skip.path])
        return ops.residual_add(skip, hidden, out.bias)

    def _spatial_transformer(self, transformer: SpatialTransformer, image: Tensor) -> Tensor:
        weights, ops = self.weights, self.ops
        height, width = image.shape[-2:]
        hidden = ops.group_norm(image, weights[transformer.norm.path], transformer.norm, silu=False)
        tokens = ops.linear(ops.image_to_tokens(hidden), weights[transformer.project_in.path])
        stream = Stream(tokens)
        for index, block in enumerate(transformer.blocks):
            stream = self._transformer_block(block, stream, index)
        tokens = ops.linear(ops.materialize(stream), weights[transformer.project_out.path])
        return ops.residual_add(image, ops.tokens_to_image(tokens, height, width), None)

    def _transformer_block(self, block: TransformerBlock, stream: Stream, index: int) -> Stream:
        weights, ops = self.weights, self.ops
        query_key_value = weights[block.self_attention.query_key_value.name]
        stream, normed = ops.layer_norm(stream, weights[block.self_norm.path], block.self_norm, query_key_value)
        mixed = self._self_attention(block.self_attention, normed)
        stream = ops.add_linear(stream, mixed, weights[block.self_attention.out.path])
        query = weights[block.cross_attention.query.path]
        stream, normed = ops.layer_norm(stream, weights[block.cross_norm.path], block.cross_norm, query)
        mixed = self._cross_attention(block.cross_attention, normed)
        stream = ops.add_linear(stream, mixed, weights[block.cross_attention.out.path])
        into, out = weights[block.feed_forward_in.path], weights[block.feed_forward_out.path]
        stream, normed = ops.layer_norm(stream, weights[block.feed_forward_norm.path], block.feed_forward_norm, into)
        return ops.add_linear(stream, ops.gated_linear(normed, into, out), out)

    def _self_attention(self, attention: SelfAttention, tokens: Rows) -> Tensor:
        fused = self.ops.linear(tokens, self.weights[attention.query_key_value.name])
        return self._attend_to_itself(attention, *fused.chunk(3, dim=-1))

    def _attend_to_itself(self, attention: SelfAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(batch, tokens, heads * width) each, and so is the mix of values."""
        perturbed, rows = self.perturbed, query.shape[0]
        if perturbed is not None and attention.query_key_value.members[0].path in perturbed.queries:
            rows = perturbed.first_row
        if rows == 0:
            return value
        queries, keys, values = (split_heads(part[:rows], attention.heads) for part in (query, key, value))
        mixed = join_heads(self.ops.attention(queries, keys, values, self.upcast_attention))
        return mixed if rows == query.shape[0] else torch.cat([mixed, value[rows:]])

    def _cross_attention(self, attention: CrossAttention, tokens: Rows) -> Tensor:
        query = split_heads(self.ops.linear(tokens, self.weights[attention.query.path]), attention.heads)
        key, value = (
            split_heads(part, attention.heads)
            for part in self.key_values[attention.key_value.name].chunk(2, dim=-1)
        )
        return join_heads(self._attend_to_context(attention, query, key, value))

    def _attend_to_context(self, attention: CrossAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(batch, heads, tokens, width) each, and so is the mix of values: the context's and the image prompts'."""
        mixed = self.ops.attention(query, key, value, self.upcast_attention)
        for prompt in self.image_prompts:
            key_value = prompt.key_value(attention.query.path)
            if key_value is not None:
                key, value = (split_heads(part, attention.heads) for part in key_value)
                image = self.ops.attention(query, key, value, self.upcast_attention)
                mask = prompt.masks.get(query.shape[2])
                mixed = mixed + (image if mask is None else image * mask[:, None])
        return mixed


def split_heads(tokens: Tensor, heads: int) -> Tensor:
    """(batch, tokens, heads * width) -> (batch, heads, tokens, width)."""
    return tokens.view(*tokens.shape[:-1], heads, -1).transpose(1, 2)


def join_heads(tokens: Tensor) -> Tensor:
    """(batch, heads, tokens, width) -> (batch, tokens, heads * width)."""
    return tokens.transpose(1, 2).flatten(2)

"""The forward pass of a Stable Diffusion UNet, as pure functions of tensors against a set of operators.

The arithmetic is that of ldm's openaimodel.UNetModel and attention.SpatialTransformer (Rombach et al. 2022), which
sgm, Forge and diffusers share. What differs from the hosts is only how often things are computed: keys and values of
the context and the label embedding once per prompt (condition), all time embedding projections in one GEMM.
"""
from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops import Operators
from .call import Control, UNetCall
from .layout import (
    Convolution,
    CrossAttention,
    Downsample,
    ResidualBlock,
    SelfAttention,
    SpatialTransformer,
    Stage,
    TimeEmbedding,
    TransformerBlock,
    UNetLayout,
    Upsample,
)
from .weights import Affine, Weights


@dataclass(frozen=True)
class Conditioning:
    """What depends on the prompt alone.

    key_values: for each cross attention in the layout's order, (batch, tokens, keys then values).
    label: (batch, embedding width), or None.
    """

    key_values: tuple[Tensor, ...]
    label: Tensor | None

    def tensors(self) -> list[Tensor]:
        return [*self.key_values, *([] if self.label is None else [self.label])]


def condition(layout: UNetLayout, weights: Weights, ops: Operators, context: Tensor, y: Tensor | None) -> Conditioning:
    """Compute what depends on the prompt alone from context (batch, tokens, width) and y (batch, width)."""
    dtype = weights[layout.time.first.path].weight.dtype
    context = context.to(dtype)
    key_values = tuple(
        ops.linear(context, weights[attention.key_value.name]) for attention in layout.cross_attentions
    )
    label = None
    if layout.label is not None and y is not None:
        hidden = ops.silu(ops.linear(y.to(dtype), weights[layout.label.first.path]))
        label = ops.linear(hidden, weights[layout.label.second.path])
    return Conditioning(key_values, label)


def sinusoids(timestep: Tensor, time: TimeEmbedding) -> Tensor:
    """(batch,) -> (batch, channels) in float32: cosines and sines of the timestep at falling frequencies.

    As ldm's timestep_embedding and diffusers' get_timestep_embedding (frequency_shift is the latter's
    downscale_freq_shift; ldm's is 0). Channels are even in every known model.
    """
    half = time.channels // 2
    exponents = torch.arange(half, dtype=torch.float32, device=timestep.device) / (half - time.frequency_shift)
    angles = timestep[:, None].float() * torch.exp(-math.log(10000) * exponents)[None] * time.scale
    waves = (angles.cos(), angles.sin())
    return torch.cat(waves if time.cosine_first else waves[::-1], dim=-1)


class Pass:
    """One forward pass in progress: the inputs that every layer needs, and the way through the layers."""

    def __init__(
        self, layout: UNetLayout, weights: Weights, ops: Operators, call: UNetCall, conditioning: Conditioning
    ) -> None:
        self.layout, self.weights, self.ops, self.call = layout, weights, ops, call
        self.control = call.control or Control()
        names = (attention.key_value.name for attention in layout.cross_attentions)
        self._key_values = dict(zip(names, conditioning.key_values, strict=True))
        self._shifts = self._embed(conditioning.label)

    def _embed(self, label: Tensor | None) -> dict[str, Tensor]:
        """What every residual block adds after its first convolution: its projection of the time and label
        embedding, and that convolution's bias, (batch, channels) each, by the projection's path."""
        layout, weights, ops, time = self.layout, self.weights, self.ops, self.layout.time
        waves = sinusoids(self.call.timestep, time).to(weights[time.first.path].weight.dtype)
        if time.condition is not None and self.call.timestep_condition is not None:
            waves = waves + ops.linear(self.call.timestep_condition.to(waves.dtype), weights[time.condition.path])
        embedding = ops.linear(ops.silu(ops.linear(waves, weights[time.first.path])), weights[time.second.path])
        if label is not None:
            embedding = embedding + label
        projected = ops.linear(ops.silu(embedding), weights[layout.embeddings.name])
        blocks = layout.residual_blocks
        biases = [weights[block.in_convolution.path].bias for block in blocks]
        if all(bias is not None for bias in biases):
            projected = projected + torch.cat([bias for bias in biases if bias is not None])
        shifts = projected.split([block.embedding.out_features for block in blocks], dim=1)
        return {block.embedding.path: shift for block, shift in zip(blocks, shifts, strict=True)}

    def encode(self, stages: int) -> tuple[Tensor, list[Tensor]]:
        """Run the first input stages; returns the image and a skip from each stage."""
        image = self.call.latent.to(self.weights[self.layout.out_convolution.path].weight.dtype)
        skips: list[Tensor] = []
        for index, stage in enumerate(self.layout.input_stages[:stages]):
            image = add_residual(self._stage(stage, image, None), self.control.input, index)
            skips.append(image)
        return image, skips

    def middle(self, image: Tensor) -> Tensor:
        image = self._stage(self.layout.middle_stage, image, None)
        for index in range(len(self.control.middle)):
            image = add_residual(image, self.control.middle, index)
        return image

    def decode(self, image: Tensor, skips: list[Tensor], stages: Iterable[int], remaining: Tensor | None) -> Tensor:
        """Run these output stages, each of which takes the last of skips.

        remaining is the skip that the stage after the last of these will take, if there is one and it is not in
        skips: the last stage must end at its size.
        """
        for index in stages:
            skip = add_residual(skips.pop(), self.control.output, index)
            if image.shape[-2:] != skip.shape[-2:]:
                image = self.ops.resize(image, *skip.shape[-2:])
            following = skips[-1] if skips else remaining
            image = self._stage(self.layout.output_stages[index], self.ops.concatenate(image, skip), following)
        return image

    def finish(self, image: Tensor) -> Tensor:
        """The output norm and convolution: (batch, out channels, height, width) in the latent's dtype."""
        layout, weights = self.layout, self.weights
        image = self.ops.group_norm(image, weights[layout.out_norm.path], layout.out_norm, silu=True)
        image = self.ops.convolution(image, weights[layout.out_convolution.path], layout.out_convolution)
        return image.to(self.call.latent.dtype)

    def _stage(self, stage: Stage, image: Tensor, following: Tensor | None) -> Tensor:
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

    def _upsample(self, layer: Upsample, image: Tensor, following: Tensor | None) -> Tensor:
        height, width = image.shape[-2] * 2, image.shape[-1] * 2
        if layer.resize_before and following is not None:
            height, width = following.shape[-2:]
        image = self.ops.resize(image, height, width)
        return self.ops.convolution(image, self.weights[layer.convolution.path], layer.convolution)

    def _residual_block(self, block: ResidualBlock, image: Tensor) -> Tensor:
        weights, ops = self.weights, self.ops
        hidden = ops.group_norm(image, weights[block.in_norm.path], block.in_norm, silu=True)
        in_weight, in_bias = weights[block.in_convolution.path]
        hidden = ops.convolution(hidden, Affine(in_weight, None), block.in_convolution)
        shift = self._shifts[block.embedding.path]
        hidden = ops.group_norm(hidden, weights[block.out_norm.path], block.out_norm, silu=True, shift=shift)
        out_weight, out_bias = weights[block.out_convolution.path]
        hidden = ops.convolution(hidden, Affine(out_weight, None), block.out_convolution)
        skip = image if block.skip is None else ops.pointwise(image, weights[block.skip.path])
        return ops.residual_add(skip, hidden, out_bias)

    def _spatial_transformer(self, transformer: SpatialTransformer, image: Tensor) -> Tensor:
        weights, ops = self.weights, self.ops
        height, width = image.shape[-2:]
        hidden = ops.group_norm(image, weights[transformer.norm.path], transformer.norm, silu=False)
        tokens = ops.linear(ops.image_to_tokens(hidden), weights[transformer.project_in.path])
        update = None
        for block in transformer.blocks:
            tokens, update = self._transformer_block(block, tokens, update)
        if update is not None:
            tokens = tokens + update
        tokens = ops.linear(tokens, weights[transformer.project_out.path])
        return ops.residual_add(image, ops.tokens_to_image(tokens, height, width), None)

    def _transformer_block(
        self, block: TransformerBlock, tokens: Tensor, update: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Tokens and what is still to be added to them: each addition waits for the norm that follows it."""
        weights, ops = self.weights, self.ops
        tokens, normed = ops.layer_norm(tokens, weights[block.self_norm.path], block.self_norm, update)
        update = self._self_attention(block.self_attention, normed)
        tokens, normed = ops.layer_norm(tokens, weights[block.cross_norm.path], block.cross_norm, update)
        update = self._cross_attention(block.cross_attention, normed)
        tokens, normed = ops.layer_norm(tokens, weights[block.feed_forward_norm.path], block.feed_forward_norm, update)
        hidden = ops.geglu(ops.linear(normed, weights[block.feed_forward_in.path]))
        return tokens, ops.linear(hidden, weights[block.feed_forward_out.path])

    def _self_attention(self, attention: SelfAttention, tokens: Tensor) -> Tensor:
        fused = self.ops.linear(tokens, self.weights[attention.query_key_value.name])
        query, key, value = (split_heads(part, attention.heads) for part in fused.chunk(3, dim=-1))
        mixed = self.ops.attention(query, key, value, self.call.upcast_attention)
        return self.ops.linear(join_heads(mixed), self.weights[attention.out.path])

    def _cross_attention(self, attention: CrossAttention, tokens: Tensor) -> Tensor:
        query = split_heads(self.ops.linear(tokens, self.weights[attention.query.path]), attention.heads)
        key, value = (
            split_heads(part, attention.heads)
            for part in self._key_values[attention.key_value.name].chunk(2, dim=-1)
        )
        mixed = self.ops.attention(query, key, value, self.call.upcast_attention)
        return self.ops.linear(join_heads(mixed), self.weights[attention.out.path])


def forward(
    layout: UNetLayout, weights: Weights, ops: Operators, call: UNetCall, conditioning: Conditioning
) -> Tensor:
    """The whole UNet: (batch, out channels, height, width) in the latent's dtype, for latents of any size."""
    running = Pass(layout, weights, ops, call, conditioning)
    image, skips = running.encode(len(layout.input_stages))
    image = running.middle(image)
    return running.finish(running.decode(image, skips, range(len(layout.output_stages)), None))


def add_residual(image: Tensor, residuals: tuple[Tensor | None, ...], index: int) -> Tensor:
    residual = residuals[index] if index < len(residuals) else None
    return image if residual is None else image + residual.to(image.dtype)


def split_heads(tokens: Tensor, heads: int) -> Tensor:
    """(batch, tokens, heads * width) -> (batch, heads, tokens, width)."""
    return tokens.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(tokens: Tensor) -> Tensor:
    """(batch, heads, tokens, width) -> (batch, tokens, heads * width)."""
    return tokens.transpose(1, 2).flatten(2)

"""The layers of a UNet, computed with a set of operators: what happens inside a stage."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ...core.affine import Affine, Weights
from ...core.call import CROSS_ATTENTION, SELF_ATTENTION, ImagePrompt, PatchPoints
from ...core.leaves import Convolution, CrossAttention, GroupNorm, ResidualBlock, SelfAttention, TransformerBlock
from ...core.operators import Image, Operators, Stream
from .layout import Downsample, SpatialTransformer, Stage, Upsample


@dataclass(frozen=True)
class Layers:
    """Everything that a stage needs besides its image.

    shifts: what each residual block adds after its first convolution, (batch, channels), by its projection's path.
    context, in the weights' dtype, and image_prompts: see Call. patches: the functions of others, called where the host
    would.
    """

    weights: Weights
    ops: Operators
    shifts: Mapping[str, Tensor]
    context: Tensor
    upcast_attention: bool
    image_prompts: tuple[ImagePrompt, ...]
    patches: PatchPoints

    def stage(self, stage: Stage, image: Image, following: Tensor | None, place: tuple[str, int]) -> Tensor:
        """Run one stage. following: the skip that the next stage takes, whose size the image must end at. place: in
        which part it is which stage."""
        for layer in stage:
            if isinstance(layer, ResidualBlock):
                image = self._residual_block(layer, image)
            elif isinstance(layer, SpatialTransformer):
                image = self._spatial_transformer(layer, image, place)
            elif isinstance(layer, Upsample):
                image = self._upsample(layer, image, following)
            else:
                shape: Convolution = layer.convolution if isinstance(layer, Downsample) else layer
                image = self.ops.convolution(image, self.weights[shape.path], shape)
        stage_output: Tensor = image
        return stage_output

    def norm(
        self, norm: GroupNorm, image: Image, shift: Tensor | None = None, reader: Affine | None = None
    ) -> Image:
        """Group norm of image + shift (batch, channels), and SiLU. reader: the convolution that it is for."""
        if self.patches.norm is None:
            return self.ops.group_norm(image, self.weights[norm.path], norm, silu=True, shift=shift, reader=reader)
        return self.ops.silu(self.patches.norm(norm.path, image if shift is None else image + shift[:, :, None, None]))

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

    def _spatial_transformer(self, transformer: SpatialTransformer, image: Tensor, place: tuple[str, int]) -> Tensor:
        weights, ops = self.weights, self.ops
        height, width = image.shape[-2:]
        hidden = ops.group_norm(image, weights[transformer.norm.path], transformer.norm, silu=False)
        tokens = ops.linear(ops.image_to_tokens(hidden), weights[transformer.project_in.path])
        stream = Stream(tokens)
        for index, block in enumerate(transformer.blocks):
            if self.patches.begin_block((*place, index), block):
                stream = self._patched_block(block, ops.materialize(stream))
            else:
                stream = self._transformer_block(block, stream)
        tokens = ops.linear(ops.materialize(stream), weights[transformer.project_out.path])
        image = ops.residual_add(image, ops.tokens_to_image(tokens, height, width), None)
        self.patches.end_transformer()
        return image

    def _transformer_block(self, block: TransformerBlock, stream: Stream) -> Stream:
        weights, ops = self.weights, self.ops
        own, cross = block.self_attention, block.cross_attention
        query_key_value, query = weights[own.query_key_value.name], weights[cross.query.path]
        stream, normed = ops.layer_norm(stream, weights[block.self_norm.path], block.self_norm, query_key_value)
        mixed = self._attend_to_itself(own, *ops.linear(normed, query_key_value).chunk(3, dim=-1))
        stream = ops.add_linear(stream, mixed, weights[own.out.path])
        stream, normed = ops.layer_norm(stream, weights[block.cross_norm.path], block.cross_norm, query)
        mixed = self._attend_to_context(cross, ops.linear(normed, query), *self._key_value(cross))
        return self._feed_forward(block, ops.add_linear(stream, mixed, weights[cross.out.path]))

    def _feed_forward(self, block: TransformerBlock, stream: Stream) -> Stream:
        weights, norm = self.weights, block.feed_forward_norm
        into, out = weights[block.feed_forward_in.path], weights[block.feed_forward_out.path]
        stream, normed = self.ops.layer_norm(stream, weights[norm.path], norm, into)
        return self.ops.add_linear(stream, self.ops.gated_linear(normed, into, out), out)

    def _patched_block(self, block: TransformerBlock, tokens: Tensor) -> Stream:
        """A block in which functions of others stand. tokens: (batch, tokens, width)."""
        replaced = self.patches.whole_block(block, tokens, self.context)
        if replaced is not None:
            return Stream(replaced)
        tokens = tokens + self._patched_self_attention(block, tokens)
        tokens = self.patches.between_attentions(tokens)
        tokens = tokens + self._patched_cross_attention(block, tokens)
        return self._feed_forward(block, Stream(tokens))

    def _patched_self_attention(self, block: TransformerBlock, tokens: Tensor) -> Tensor:
        """What self attention adds to the tokens (batch, tokens, width)."""
        weights, ops, patches = self.weights, self.ops, self.patches
        attention, norm = block.self_attention, block.self_norm
        members = attention.query_key_value.members
        fused = weights[attention.query_key_value.name]
        _, normed = ops.layer_norm(Stream(tokens), weights[norm.path], norm, fused)
        replaced = patches.whole_attention(SELF_ATTENTION, block, normed, self.context)
        if replaced is not None:
            return replaced
        inputs = patches.self_attention_inputs(normed)
        projected = tuple(
            ops.linear(given, weights[member.path]) for given, member in zip(inputs, members, strict=True)
        )
        mixed = patches.attend(SELF_ATTENTION, *projected)
        if mixed is None:
            mixed = self._attend_to_itself(attention, *projected)
        return patches.attention_output(SELF_ATTENTION, ops.linear(mixed, weights[attention.out.path]))

    def _patched_cross_attention(self, block: TransformerBlock, tokens: Tensor) -> Tensor:
        """What cross attention adds to the tokens (batch, tokens, width)."""
        weights, ops, patches = self.weights, self.ops, self.patches
        attention, norm = block.cross_attention, block.cross_norm
        query_weights = weights[attention.query.path]
        _, normed = ops.layer_norm(Stream(tokens), weights[norm.path], norm, query_weights)
        replaced = patches.whole_attention(CROSS_ATTENTION, block, normed, self.context)
        if replaced is not None:
            return replaced
        given, keyed, valued = patches.cross_attention_inputs(normed, self.context)
        query = ops.linear(given, query_weights)
        if keyed is self.context and valued is self.context:
            key, value = self._key_value(attention)
        else:
            key, value = (
                ops.linear(source, weights[member.path])
                for source, member in zip((keyed, valued), attention.key_value.members, strict=True)
            )
        mixed = patches.attend(CROSS_ATTENTION, query, key, value)
        if mixed is None:
            mixed = self._attend_to_context(attention, query, key, value)
        return patches.attention_output(CROSS_ATTENTION, ops.linear(mixed, weights[attention.out.path]))

    def _attend_to_itself(self, attention: SelfAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(batch, tokens, heads * width) each, and so is the mix of values."""
        queries, keys, values = (split_heads(part, attention.heads) for part in (query, key, value))
        return join_heads(self.ops.attention(queries, keys, values, self.upcast_attention))

    def _key_value(self, attention: CrossAttention) -> tuple[Tensor, ...]:
        """Keys and values of the context, (batch, tokens, heads * width) each."""
        return self.ops.linear(self.context, self.weights[attention.key_value.name]).chunk(2, dim=-1)

    def _attend_to_context(self, attention: CrossAttention, *projected: Tensor) -> Tensor:
        """Of queries, keys and values, (batch, tokens, heads * width) each, the mix of values: the context's and the
        image prompts'."""
        query, key, value = (split_heads(part, attention.heads) for part in projected)
        mixed = self.ops.attention(query, key, value, self.upcast_attention)
        for prompt in self.image_prompts:
            key_value = prompt.key_value(attention.query.path)
            if key_value is not None:
                key, value = (split_heads(part, attention.heads) for part in key_value)
                mixed = mixed + self.ops.attention(query, key, value, self.upcast_attention)
        return join_heads(mixed)


def split_heads(tokens: Tensor, heads: int) -> Tensor:
    """(batch, tokens, heads * width) -> (batch, heads, tokens, width)."""
    return tokens.view(*tokens.shape[:-1], heads, -1).transpose(1, 2)


def join_heads(tokens: Tensor) -> Tensor:
    """(batch, heads, tokens, width) -> (batch, tokens, heads * width)."""
    return tokens.transpose(1, 2).flatten(2)

"""The layers of a UNet, computed with a set of operators: what happens inside a stage."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...core.layer_weights import LayerWeights, Weights
from ...core.leaves import Convolution, CrossAttention, GroupNorm, Linear, SelfAttention
from ...core.operators import GEGLU, Image, Operators, Residual
from .call import ImagePrompt
from .layout import Downsample, ResidualBlock, SpatialTransformer, Stage, TransformerBlock, Upsample
from .patch_points import CROSS_ATTENTION, SELF_ATTENTION, PatchPoints


@dataclass(frozen=True)
class Layers:
    """Everything that a stage needs besides its image.

    shifts: what each residual block adds after its first convolution, (batch, channels), by its projection's path.
    context, in the weights' dtype, and image_prompts: see UNetCall. patches: the functions of others, called where the
    host would.
    """

    weights: Weights
    ops: Operators
    shifts: Mapping[str, Tensor]
    context: Tensor
    upcast_attention: bool
    image_prompts: tuple[ImagePrompt, ...]
    patches: PatchPoints

    def stage(self, stage: Stage, image: Image, following: Tensor | None, place: tuple[str, int]) -> Tensor:
        """Run one stage. following: the skip that the next stage takes, whose size the image must end at. place: the
        part of the UNet (INPUT, MIDDLE or OUTPUT), and the index of the stage in it."""
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
        self, norm: GroupNorm, image: Image, shift: Tensor | None = None, consumer: LayerWeights | None = None
    ) -> Image:
        """Group norm of image + shift (batch, channels), and SiLU. consumer: the convolution that it is for."""
        if self.patches.norm is None:
            return self.ops.group_norm(image, self.weights[norm.path], norm, silu=True, shift=shift, consumer=consumer)
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
        residual = Residual(tokens)
        for index, block in enumerate(transformer.blocks):
            if self.patches.begin_block((*place, index), block):
                residual = self._patched_block(block, ops.materialize(residual))
            else:
                residual = self._transformer_block(block, residual)
        tokens = ops.linear(ops.materialize(residual), weights[transformer.project_out.path])
        image = ops.residual_add(image, ops.tokens_to_image(tokens, height, width), None)
        self.patches.end_transformer()
        return image

    def _transformer_block(self, block: TransformerBlock, residual: Residual) -> Residual:
        weights, ops = self.weights, self.ops
        own, cross = block.self_attention, block.cross_attention
        query_key_value, query = weights[own.query_key_value.name], weights[cross.query.path]
        residual, normed = ops.residual_norm(residual, weights[block.self_norm.path], block.self_norm, query_key_value)
        mixed = self._attend(own, *ops.linear(normed, query_key_value).chunk(3, dim=-1))
        residual = ops.add_linear(residual, mixed, weights[own.out.path])
        residual, normed = ops.residual_norm(residual, weights[block.cross_norm.path], block.cross_norm, query)
        mixed = self._attend(cross, ops.linear(normed, query), *self._key_value(cross))
        return self._feed_forward(block, ops.add_linear(residual, mixed, weights[cross.out.path]))

    def _feed_forward(self, block: TransformerBlock, residual: Residual) -> Residual:
        weights, norm = self.weights, block.feed_forward_norm
        into, out = weights[block.feed_forward_in.path], weights[block.feed_forward_out.path]
        residual, normed = self.ops.residual_norm(residual, weights[norm.path], norm, into)
        return self.ops.add_linear(residual, self.ops.gated_linear(normed, into, GEGLU, out), out)

    def _patched_block(self, block: TransformerBlock, tokens: Tensor) -> Residual:
        """A block in which functions of others stand. tokens: (batch, tokens, width)."""
        replaced = self.patches.whole_block(block, tokens, self.context)
        if replaced is not None:
            return Residual(replaced)
        tokens = tokens + self._patched_attention(SELF_ATTENTION, block, tokens)
        tokens = self.patches.between_attentions(tokens)
        tokens = tokens + self._patched_attention(CROSS_ATTENTION, block, tokens)
        return self._feed_forward(block, Residual(tokens))

    def _patched_attention(self, name: str, block: TransformerBlock, tokens: Tensor) -> Tensor:
        """What an attention adds to the tokens (batch, tokens, width). name: SELF_ATTENTION or CROSS_ATTENTION."""
        weights = self.weights
        ops = self.ops
        patches = self.patches
        own = block.self_attention
        cross = block.cross_attention
        is_self = name == SELF_ATTENTION
        if is_self:
            attention: SelfAttention | CrossAttention = own
            norm = block.self_norm
            consumer = weights[own.query_key_value.name]
        else:
            attention = cross
            norm = block.cross_norm
            consumer = weights[cross.query.path]
        _, normed = ops.residual_norm(Residual(tokens), weights[norm.path], norm, consumer)
        replaced = patches.whole_attention(name, block, normed, self.context)
        if replaced is not None:
            return replaced
        if is_self:
            projected = self._each(own.query_key_value.members, patches.self_attention_inputs(normed))
        else:
            given, *others = patches.cross_attention_inputs(normed, self.context)
            is_plain = all(other is self.context for other in others)
            query = ops.linear(given, consumer)
            projected = query, *(self._key_value(cross) if is_plain else self._each(cross.key_value.members, others))
        mixed = patches.attend(name, *projected)
        if mixed is None:
            mixed = self._attend(attention, *projected)
        return patches.attention_output(name, ops.linear(mixed, weights[attention.out.path]))

    def _each(self, layers: Sequence[Linear], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What each of these layers makes of its own input."""
        return tuple(
            self.ops.linear(given, self.weights[layer.path]) for layer, given in zip(layers, inputs, strict=True)
        )

    def _key_value(self, attention: CrossAttention) -> tuple[Tensor, ...]:
        """Keys and values of the context, (batch, tokens, heads * width) each."""
        return self.ops.linear(self.context, self.weights[attention.key_value.name]).chunk(2, dim=-1)

    def _attend(self, attention: SelfAttention | CrossAttention, *projected: Tensor) -> Tensor:
        """Of queries, keys and values, (batch, tokens, heads * width) each, the mix of values, and of a cross attention
        the image prompts' too."""
        query, key, value = (split_heads(part, attention.heads) for part in projected)
        mixed = self.ops.attention(query, key, value, self.upcast_attention)
        if isinstance(attention, CrossAttention):
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

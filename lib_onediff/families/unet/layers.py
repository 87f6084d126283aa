"""Computes one stage of a UNet: residual blocks, spatial transformers, and the convolutions that change the size."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...core.layer_weights import LayerWeights, Weights
from ...core.leaves import Convolution, CrossAttention, GroupNorm, Linear, SelfAttention
from ...core.operators import GEGLU, Image, Operators, Residual
from ..transformer import TransformerLayers
from .call import ImagePrompt
from .layout import Downsample, ResidualBlock, SpatialTransformer, Stage, TransformerBlock, Upsample
from .patch_points import CROSS_ATTENTION, SELF_ATTENTION, PatchPoints


@dataclass(frozen=True)
class Layers:
    """Computes stages. Images are (batch, channels, height, width), tokens (batch, tokens, width).

    transformer: computes the layers of transformer blocks; its weights and operators are used for all other layers,
        too.
    shifts: see forward.block_shifts.
    context, image_prompts: see UNetCall; the context is in the weights' dtype.
    patches: the functions of other extensions, called where the host's own forward calls them.
    """

    transformer: TransformerLayers
    shifts: Mapping[str, Tensor]
    context: Tensor
    image_prompts: tuple[ImagePrompt, ...]
    patches: PatchPoints

    @property
    def weights(self) -> Weights:
        """The network's weights."""
        return self.transformer.weights

    @property
    def ops(self) -> Operators:
        """The backend's operators."""
        return self.transformer.ops

    def stage(self, stage: Stage, image: Image, following: Tensor | None, place: tuple[str, int]) -> Tensor:
        """The output of one stage, (batch, channels, height, width). image: the stage's input.

        following: the skip that the next output stage takes. An Upsample with resize_before enlarges the image to this
            skip's size. None for input stages, the middle stage and the last output stage.
        place: the part of the UNet (INPUT, MIDDLE or OUTPUT), and the index of the stage in it.
        """
        for layer in stage:
            if isinstance(layer, ResidualBlock):
                image = self._residual_block(layer, image)
            elif isinstance(layer, SpatialTransformer):
                image = self._spatial_transformer(layer, image, place)
            elif isinstance(layer, Upsample):
                image = self._upsample(layer, image, following)
            elif isinstance(layer, Downsample):
                image = self._convolution(layer.convolution, image)
            else:
                image = self._convolution(layer, image)
        output: Tensor = image
        return output

    def norm(
        self, norm: GroupNorm, image: Image, shift: Tensor | None = None, consumer: LayerWeights | None = None
    ) -> Image:
        """SiLU of the group norm of image + shift, for the convolution that reads the result.

        shift: (batch, channels); None for 0. consumer: the weights of that convolution: if they are in 8 bits, the
            device may return the result quantized. Without a consumer (None), the result is a tensor; so it is if an
            extension's function replaces the norm (patches.norm).
        """
        if self.patches.norm is None:
            return self.ops.group_norm(image, self.weights[norm.path], norm, silu=True, shift=shift, consumer=consumer)
        if shift is not None:
            image = image + shift[:, :, None, None]
        return self.ops.silu(self.patches.norm(norm.path, image))

    # --- images ---------------------------------------------------------------------------------------------------

    def _convolution(self, convolution: Convolution, image: Image) -> Tensor:
        """The image after a convolution with its bias."""
        return self.ops.convolution(image, self.weights[convolution.path], convolution)

    def _upsample(self, layer: Upsample, image: Tensor, following: Tensor | None) -> Tensor:
        """The image, enlarged by nearest-neighbour resizing and then convolved. It is enlarged to the height and width
        of `following` if that is given and the layer has resize_before; otherwise to twice its own height and width.
        following: see stage()."""
        height, width = image.shape[-2:]
        height *= 2
        width *= 2
        if layer.resize_before and following is not None:
            height, width = following.shape[-2:]
        return self._convolution(layer.convolution, self.ops.resize(image, height, width))

    def _residual_block(self, block: ResidualBlock, image: Tensor) -> Tensor:
        """The output of a residual block: the second convolution's output plus the image, or plus the image's 1x1
        convolution if the block has one (skip)."""
        weights = self.weights
        ops = self.ops
        # The first convolution's bias is part of the shift, and the second one's is added together with the skip:
        # neither takes a pass of its own over the image.
        into = weights[block.in_convolution.path]._replace(bias=None)
        out = weights[block.out_convolution.path]
        hidden = ops.convolution(self.norm(block.in_norm, image, None, into), into, block.in_convolution)
        hidden = self.norm(block.out_norm, hidden, self.shifts[block.embedding.path], out)
        hidden = ops.convolution(hidden, out._replace(bias=None), block.out_convolution)
        skip = image if block.skip is None else ops.pointwise(image, weights[block.skip.path])
        return ops.residual_add(skip, hidden, out.bias)

    # --- tokens ---------------------------------------------------------------------------------------------------

    def _spatial_transformer(self, transformer: SpatialTransformer, image: Tensor, place: tuple[str, int]) -> Tensor:
        """The image plus the output of a spatial transformer, whose tokens are the image's pixels. place: see
        stage()."""
        ops = self.ops
        layers = self.transformer
        height, width = image.shape[-2:]
        hidden = ops.group_norm(image, self.weights[transformer.norm.path], transformer.norm, silu=False)
        residual = Residual(layers.linear(ops.image_to_tokens(hidden), transformer.project_in))
        for index, block in enumerate(transformer.blocks):
            if self.patches.begin_block((*place, index), block):
                residual = self._patched_block(block, ops.materialize(residual))
            else:
                residual = self._transformer_block(block, residual)
        tokens = layers.linear(ops.materialize(residual), transformer.project_out)
        image = ops.residual_add(image, ops.tokens_to_image(tokens, height, width), None)
        self.patches.end_transformer()
        return image

    def _transformer_block(self, block: TransformerBlock, residual: Residual) -> Residual:
        """The residual after a transformer block, by fused operators: for blocks in which no function of an extension
        is set."""
        layers = self.transformer
        own = block.self_attention
        cross = block.cross_attention
        residual, normed = layers.norm(residual, block.self_norm, own.query_key_value)
        residual = layers.add(residual, layers.self_attention(own, normed), own.out)
        residual, normed = layers.norm(residual, block.cross_norm, cross.query)
        mixed = self._attend(cross, layers.linear(normed, cross.query), *self._key_value(cross))
        residual = layers.add(residual, mixed, cross.out)
        return self._feed_forward(block, residual)

    def _feed_forward(self, block: TransformerBlock, residual: Residual) -> Residual:
        """The residual plus the output of a block's feed-forward layer, whose norm is included."""
        layers = self.transformer
        into = block.feed_forward_in
        out = block.feed_forward_out
        residual, normed = layers.norm(residual, block.feed_forward_norm, into)
        return layers.add(residual, layers.gated_linear(normed, into, GEGLU, out), out)

    def _patched_block(self, block: TransformerBlock, tokens: Tensor) -> Residual:
        """The residual after a transformer block in which functions of other extensions are set. A function may replace
        the whole block (whole_block); otherwise the functions within it are called at their points."""
        replaced = self.patches.whole_block(block, tokens, self.context)
        if replaced is not None:
            return Residual(replaced)
        tokens = tokens + self._patched_self_attention(block, tokens)
        tokens = self.patches.between_attentions(tokens)
        tokens = tokens + self._patched_cross_attention(block, tokens)
        return self._feed_forward(block, Residual(tokens))

    def _patched_self_attention(self, block: TransformerBlock, tokens: Tensor) -> Tensor:
        """The output of a block's self attention, with the norm before it; the caller adds it to the tokens. A function
        may replace the whole attention after the norm (whole_attention): then the attention's other points are not
        called."""
        attention = block.self_attention
        _, normed = self.transformer.norm(Residual(tokens), block.self_norm, attention.query_key_value)
        replaced = self.patches.whole_attention(SELF_ATTENTION, block, normed, self.context)
        if replaced is not None:
            return replaced
        inputs = self.patches.self_attention_inputs(normed)
        projected = self._each(attention.query_key_value.members, inputs)
        return self._patched_output(SELF_ATTENTION, attention, *projected)

    def _patched_cross_attention(self, block: TransformerBlock, tokens: Tensor) -> Tensor:
        """The output of a block's cross attention, with the norm before it; the caller adds it to the tokens. A
        function may replace the whole attention after the norm (whole_attention): then the attention's other points are
        not called, and nothing of IP-Adapters is added."""
        attention = block.cross_attention
        _, normed = self.transformer.norm(Residual(tokens), block.cross_norm, attention.query)
        replaced = self.patches.whole_attention(CROSS_ATTENTION, block, normed, self.context)
        if replaced is not None:
            return replaced
        for_query, *for_key_value = self.patches.cross_attention_inputs(normed, self.context)
        query = self.transformer.linear(for_query, attention.query)
        if all(given is self.context for given in for_key_value):
            key, value = self._key_value(attention)
        else:
            key, value = self._each(attention.key_value.members, for_key_value)
        return self._patched_output(CROSS_ATTENTION, attention, query, key, value)

    def _patched_output(
        self, name: str, attention: SelfAttention | CrossAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """The output of an attention after its last linear layer.

        A function at the point `attend` may replace the softmax attention, whose output is that layer's input: then the
        attentions of IP-Adapters are left out. A function at the point `attention_output` may replace the layer's
        output.
        name: SELF_ATTENTION or CROSS_ATTENTION. query, key, value: (batch, tokens, heads * head width).
        """
        mixed = self.patches.attend(name, query, key, value)
        if mixed is None:
            mixed = self._attend(attention, query, key, value)
        return self.patches.attention_output(name, self.transformer.linear(mixed, attention.out))

    def _each(self, layers: Sequence[Linear], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs of linear layers, each for the input at the same index, one product a layer. For the projections
        of a patched attention, whose inputs a function may have made different; elsewhere they are one fused product.
        """
        return tuple(self.transformer.linear(given, layer) for layer, given in zip(layers, inputs, strict=True))

    def _key_value(self, attention: CrossAttention) -> tuple[Tensor, ...]:
        """A cross attention's keys and values of the context, (batch, tokens, heads * head width) each, by one
        product."""
        return self.transformer.linear(self.context, attention.key_value).chunk(2, dim=-1)

    def _attend(
        self, attention: SelfAttention | CrossAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """The output of an attention before its last linear layer. In a cross attention, the output of a second
        attention is added for each IP-Adapter that changes it: from the same queries to the tokens of the image.

        query, key, value, and the result: (batch, tokens, heads * head width).
        """
        layers = self.transformer
        heads = attention.heads
        query = layers.heads(query, heads)
        mixed = layers.attend(query, layers.heads(key, heads), layers.heads(value, heads))
        if isinstance(attention, CrossAttention):
            for prompt in self.image_prompts:
                key_value = prompt.key_value(attention.query.path)
                if key_value is not None:
                    key, value = key_value
                    mixed = mixed + layers.attend(query, layers.heads(key, heads), layers.heads(value, heads))
        return mixed

"""The forward pass of a UNet on which users have put functions: as forward.py, with their functions called where the
host's own forward calls them (patch_points.py says where that is)."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...core.affine import Affine, Weights
from ...core.call import UNetCall
from ...core.leaves import CrossAttention, GroupNorm, SelfAttention, TransformerBlock
from ...core.operators import Image, Operators, Stream
from ...core.patch_points import CROSS_ATTENTION, INPUT, LAST, MIDDLE, OUTPUT, SELF_ATTENTION, PatchPoints
from .forward import Pass, add_residual
from .layers import Layers, join_heads, split_heads
from .layout import SpatialTransformer, UNetLayout


def patched_forward(
    layout: UNetLayout, weights: Weights, ops: Operators, call: UNetCall, patches: PatchPoints
) -> Tensor:
    """The whole UNet, as forward.forward, with the functions of other extensions that the call brings."""
    patches.begin(call.latent)
    return PatchedPass(layout, weights, ops, call, patches).whole()


class PatchedPass(Pass):
    def __init__(
        self, layout: UNetLayout, weights: Weights, ops: Operators, call: UNetCall, patches: PatchPoints
    ) -> None:
        self.patches = patches
        super().__init__(layout, weights, ops, call)
        dtype = weights[layout.time.first.path].weight.dtype
        self.patched = PatchedLayers(**vars(self.layers), patches=patches, context=call.context.to(dtype))

    def embedding(self, label: Tensor | None) -> Tensor:
        embedding = self.patches.embedding(super().embedding(None))
        return embedding if label is None else embedding + label

    def encode(self, stages: int) -> tuple[Tensor, list[Tensor]]:
        hidden_states = self.call.latent.to(self.weights[self.layout.out_convolution.path].weight.dtype)
        skips: list[Tensor] = []
        for index, stage in enumerate(self.layout.input_stages[:stages]):
            hidden_states = self.patches.before_stage(INPUT, index, hidden_states)
            hidden_states = self.patched.at(INPUT, index).stage(stage, hidden_states, None)
            hidden_states = add_residual(hidden_states, self.control.input, index)
            skip = self.patches.after_stage(INPUT, index, hidden_states)
            hidden_states = self.patches.after_skip(index, skip)
            # A function may have written to what the skip is: operators must not use what they know of it.
            skips.append(skip if hidden_states is skip else skip.detach())
        return hidden_states, skips

    def middle(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.patches.before_stage(MIDDLE, 0, hidden_states)
        hidden_states = self.patched.at(MIDDLE, 0).stage(self.layout.middle_stage, hidden_states, None)
        for index in range(len(self.control.middle)):
            hidden_states = add_residual(hidden_states, self.control.middle, index)
        return self.patches.after_stage(MIDDLE, 0, hidden_states)

    def decode(
        self, hidden_states: Tensor, skips: list[Tensor], stages: Iterable[int], remaining: Tensor | None
    ) -> Tensor:
        for index in stages:
            skip = add_residual(skips.pop(), self.control.output, index)
            if self.call.freeu is not None:
                hidden_states, skip = self.call.freeu.apply(index, hidden_states, skip)
            hidden_states, skip = self.patches.join(index, hidden_states, skip)
            joined = self._concatenated(index, hidden_states, skip)
            following = skips[-1] if skips else remaining
            hidden_states = self.patched.at(OUTPUT, index).stage(self.layout.output_stages[index], joined, following)
            hidden_states = self.patches.after_stage(OUTPUT, index, hidden_states)
        return hidden_states

    def _concatenated(self, index: int, hidden_states: Tensor, skip: Tensor) -> Image:
        joined = self.patches.concatenate(index, hidden_states, skip)
        if joined is None:
            if hidden_states.shape[-2:] != skip.shape[-2:]:
                hidden_states = self.ops.resize(hidden_states, *skip.shape[-2:])
            if not self.patches.sees_stages:
                return self.ops.concatenate(hidden_states, skip)
            joined = torch.cat([hidden_states, skip], dim=1)
        return self.patches.before_stage(OUTPUT, index, joined)

    def finish(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.patches.before_stage(LAST, 0, hidden_states)
        hidden_states, out = self.patched.norm(self.layout.out_norm, hidden_states), self.layout.out_convolution
        hidden_states = self.ops.convolution(hidden_states, self.weights[out.path], out)
        return self.patches.after_stage(LAST, 0, hidden_states).to(self.call.latent.dtype)


@dataclass(frozen=True, kw_only=True)
class PatchedLayers(Layers):
    """The layers of one stage, with the functions that run within them. context: in the weights' dtype."""

    patches: PatchPoints
    context: Tensor
    part: str = ""
    index: int = 0

    def at(self, part: str, index: int) -> PatchedLayers:
        return replace(self, part=part, index=index)

    def _spatial_transformer(self, transformer: SpatialTransformer, hidden_states: Tensor) -> Tensor:
        hidden_states = super()._spatial_transformer(transformer, hidden_states)
        self.patches.end_transformer()
        return hidden_states

    def _transformer_block(self, block: TransformerBlock, stream: Stream, index: int) -> Stream:
        weights, ops, patches = self.weights, self.ops, self.patches
        if not patches.begin_block((self.part, self.index, index), block):
            return super()._transformer_block(block, stream, index)
        tokens = ops.materialize(stream)
        replaced = patches.whole_block(block, tokens, self.context)
        if replaced is not None:
            return Stream(replaced)
        tokens = tokens + self._self_attended(block, tokens)
        tokens = patches.between_attentions(tokens)
        tokens = tokens + self._cross_attended(block, tokens)
        into, out = weights[block.feed_forward_in.path], weights[block.feed_forward_out.path]
        norm = block.feed_forward_norm
        stream, normed = ops.layer_norm(Stream(tokens), weights[norm.path], norm, into)
        return ops.add_linear(stream, ops.gated_linear(normed, into, out), out)

    def _self_attended(self, block: TransformerBlock, tokens: Tensor) -> Tensor:
        """What self attention adds to the tokens (batch, tokens, width)."""
        attention, norm = block.self_attention, block.self_norm
        fused = self.weights[attention.query_key_value.name]
        _, normed = self.ops.layer_norm(Stream(tokens), self.weights[norm.path], norm, fused)
        replaced = self.patches.whole_attention(SELF_ATTENTION, block, normed, self.context)
        if replaced is not None:
            return replaced
        inputs = self.patches.self_attention_inputs(normed)
        members = attention.query_key_value.members
        if len(members) == 1:
            projected = self.ops.linear(inputs[0], self.weights[members[0].path]).chunk(3, dim=-1)
        else:
            projected = tuple(
                self.ops.linear(given, self.weights[member.path]) for given, member in zip(inputs, members, strict=True)
            )
        mixed = self.patches.attend(SELF_ATTENTION, *projected)
        if mixed is None:
            mixed = self._attend_to_itself(attention, *projected)
        return self._projected(SELF_ATTENTION, attention, mixed)

    def _cross_attended(self, block: TransformerBlock, tokens: Tensor) -> Tensor:
        """What cross attention adds to the tokens (batch, tokens, width)."""
        attention, norm = block.cross_attention, block.cross_norm
        query_weights = self.weights[attention.query.path]
        _, normed = self.ops.layer_norm(Stream(tokens), self.weights[norm.path], norm, query_weights)
        replaced = self.patches.whole_attention(CROSS_ATTENTION, block, normed, self.context)
        if replaced is not None:
            return replaced
        given, keyed, valued = self.patches.cross_attention_inputs(normed, self.context)
        query = self.ops.linear(given, query_weights)
        if keyed is self.context and valued is self.context:
            key, value = self.key_values[attention.key_value.name].chunk(2, dim=-1)
        else:
            key, value = (
                self.ops.linear(source, self.weights[member.path])
                for source, member in zip((keyed, valued), attention.key_value.members, strict=True)
            )
        mixed = self.patches.attend(CROSS_ATTENTION, query, key, value)
        if mixed is None:
            parts = (split_heads(part, attention.heads) for part in (query, key, value))
            mixed = join_heads(self._attend_to_context(attention, *parts))
        return self._projected(CROSS_ATTENTION, attention, mixed)

    def _projected(self, name: str, attention: SelfAttention | CrossAttention, mixed: Tensor) -> Tensor:
        return self.patches.attention_output(name, self.ops.linear(mixed, self.weights[attention.out.path]))

    def norm(
        self, norm: GroupNorm, hidden_states: Image, shift: Tensor | None = None, reader: Affine | None = None
    ) -> Image:
        if self.patches.norm is None:
            return super().norm(norm, hidden_states, shift, reader)
        shifted = hidden_states if shift is None else hidden_states + shift[:, :, None, None]
        return self.ops.silu(self.patches.norm(norm.path, shifted))

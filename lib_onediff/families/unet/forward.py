"""The forward pass of a Stable Diffusion UNet, over the operators of core.operators.

The arithmetic is that of ldm's openaimodel.UNetModel and attention.SpatialTransformer (Rombach et al. 2022), which sgm,
Forge and diffusers share, in fewer products: all projections of the time embedding are one GEMM, and so are the
projections that an attention makes of the same tokens. Nothing computed from weights or prompt is kept after a call, so
an edit of either takes effect at the next call. Functions of other extensions are called where the host's own forward
calls them (patch_points).
"""
from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...core.layer_weights import Weights, bias_of
from ...core.operators import Image, Operators
from ..transformer import TransformerLayers
from .call import Control, UNetCall
from .layers import Layers
from .layout import UNetLayout
from .patch_points import INPUT, LAST, MIDDLE, OUTPUT, PatchPoints


def full_pass(
    layout: UNetLayout, weights: Weights, ops: Operators, call: UNetCall, depth: int
) -> tuple[Tensor, Tensor]:
    """The output of the whole UNet, (batch, out channels, height, width) in the latent's dtype, and the deep feature
    that DeepCache (Ma et al. 2023) reuses: the hidden states that enter the last `depth` output stages.

    depth: how many of the first input stages, and of the last output stages, a cached pass will compute. 0: there is no
        cut. The second result is then the output of the last stage, which the caller ignores.
    """
    running = Pass(layout, weights, ops, call)
    stages = len(layout.output_stages)
    hidden_states, skips = running.encode(stages)
    deep_skips = skips[depth:]
    # Without this, both lists would hold the skips, and their memory would not be freed by the stages that take them.
    del skips[depth:]
    remaining = skips[-1] if skips else None
    hidden_states = running.middle(hidden_states)
    deep = running.decode(hidden_states, deep_skips, range(stages - depth), remaining)
    hidden_states = running.decode(deep, skips, range(stages - depth, stages), None)
    return running.finish(hidden_states), deep


def cached_pass(
    layout: UNetLayout, weights: Weights, ops: Operators, call: UNetCall, depth: int, deep: Tensor
) -> Tensor:
    """The UNet's output, (batch, out channels, height, width) in the latent's dtype, computed by the first `depth`
    input stages and the last `depth` output stages alone.

    depth: at least 1. deep: the deep feature of an earlier step (see full_pass), which replaces what the stages in
    between would compute.
    """
    running = Pass(layout, weights, ops, call)
    stages = len(layout.output_stages)
    _, skips = running.encode(depth)
    hidden_states = running.decode(deep, skips, range(stages - depth, stages), None)
    return running.finish(hidden_states)


class Pass:
    """One forward pass of a call, in parts: encode, middle, decode and finish, in this order; decode may be called
    several times. A cached pass leaves out middle. A new object is made for each call: __init__ calls the first two
    points of the call's patches (begin, embedding) and computes the time embedding.

    hidden_states are (batch, channels, height, width), in the weights' dtype.

    control, patches: the call's; a Control or PatchPoints that does nothing if the call has None.
    layers: computes the stages of this call.
    """

    def __init__(self, layout: UNetLayout, weights: Weights, ops: Operators, call: UNetCall) -> None:
        self.layout = layout
        self.weights = weights
        self.ops = ops
        self.call = call
        self.control = call.control or Control()
        self.patches = call.patches or PatchPoints()
        self.patches.begin(call.latent)
        self._dtype = weights[layout.time.first.path].weight.dtype
        label = embedded_label(layout, weights, ops, call.y)
        embedding = self.patches.embedding(time_embedding(layout, weights, ops, call))
        shifts = block_shifts(layout, weights, ops, embedding if label is None else embedding + label)
        transformer = TransformerLayers(weights, ops, call.upcast_attention)
        context = call.context.to(self._dtype)
        self.layers = Layers(transformer, shifts, context, call.image_prompts, self.patches)

    def encode(self, stages: int) -> tuple[Tensor, list[Tensor]]:
        """The hidden states after the first `stages` input stages, beginning with the call's latent, and the skips: one
        tensor for each of these stages, in their order. Hidden states and skips include the residuals of ControlNets
        (Control.input)."""
        hidden_states = self.call.latent.to(self._dtype)
        skips: list[Tensor] = []
        for index, stage in enumerate(self.layout.input_stages[:stages]):
            hidden_states = self.patches.before_stage(INPUT, index, hidden_states)
            hidden_states = self.layers.stage(stage, hidden_states, None, (INPUT, index))
            hidden_states = add_residual(hidden_states, self.control.input, index)
            skip = self.patches.after_stage(INPUT, index, hidden_states)
            hidden_states = self.patches.after_skip(index, skip)
            # A function may have written into the tensor in after_skip. Operators may have kept facts about the tensor
            # object, which are no longer true: none are kept about a new object over the same memory.
            skips.append(skip if hidden_states is skip else skip.detach())
        return hidden_states, skips

    def middle(self, hidden_states: Tensor) -> Tensor:
        """The hidden states after the middle stage, with the residuals of ControlNets (Control.middle). hidden_states:
        those that encode() returns."""
        hidden_states = self.patches.before_stage(MIDDLE, 0, hidden_states)
        hidden_states = self.layers.stage(self.layout.middle_stage, hidden_states, None, (MIDDLE, 0))
        for index in range(len(self.control.middle)):
            hidden_states = add_residual(hidden_states, self.control.middle, index)
        return self.patches.after_stage(MIDDLE, 0, hidden_states)

    def decode(
        self, hidden_states: Tensor, skips: list[Tensor], stages: Iterable[int], remaining: Tensor | None
    ) -> Tensor:
        """The hidden states after the output stages of these indices (ascending, without a gap).

        skips: one for each of these stages. Each stage removes the last one from this list and takes it, with the
            residual of ControlNets (Control.output) added.
        remaining: the skip that the next stage after these will take: an Upsample at the end of these stages may have
            to enlarge its result to the size of this skip. None if no stage follows.
        """
        for index in stages:
            skip = add_residual(skips.pop(), self.control.output, index)
            hidden_states, skip = self.patches.join(index, hidden_states, skip)
            joined = self._concatenated(index, hidden_states, skip)
            following = skips[-1] if skips else remaining
            hidden_states = self.layers.stage(self.layout.output_stages[index], joined, following, (OUTPUT, index))
            hidden_states = self.patches.after_stage(OUTPUT, index, hidden_states)
        return hidden_states

    def _concatenated(self, index: int, hidden_states: Tensor, skip: Tensor) -> Image:
        """The input of the output stage of this index: the hidden states, resized to the skip's size if their size
        differs, and the skip, joined along the channels. The device may defer the joining, unless a function of an
        extension reads the joined tensor."""
        joined = self.patches.concatenate(index, hidden_states, skip)
        if joined is None:
            if hidden_states.shape[-2:] != skip.shape[-2:]:
                hidden_states = self.ops.resize(hidden_states, *skip.shape[-2:])
            if not self.patches.sees_stages:
                return self.ops.concatenate(hidden_states, skip)
            joined = torch.cat([hidden_states, skip], dim=1)
        return self.patches.before_stage(OUTPUT, index, joined)

    def finish(self, hidden_states: Tensor) -> Tensor:
        """The UNet's output, after the last norm and convolution: (batch, out channels, height, width) in the latent's
        dtype."""
        hidden_states = self.patches.before_stage(LAST, 0, hidden_states)
        out = self.layout.out_convolution
        normed = self.layers.norm(self.layout.out_norm, hidden_states)
        output = self.ops.convolution(normed, self.weights[out.path], out)
        return self.patches.after_stage(LAST, 0, output).to(self.call.latent.dtype)


def embedded_label(layout: UNetLayout, weights: Weights, ops: Operators, y: Tensor | None) -> Tensor | None:
    """The embedding of y, SDXL's pooled prompt and sizes, to be added to the time embedding: (batch, y width) ->
    (batch, embedding width). None if the UNet takes no y, or if y is None."""
    if layout.label is None or y is None:
        return None
    dtype = weights[layout.time.first.path].weight.dtype
    hidden = ops.silu(ops.linear(y.to(dtype), weights[layout.label.first.path]))
    return ops.linear(hidden, weights[layout.label.second.path])


def time_embedding(layout: UNetLayout, weights: Weights, ops: Operators, call: UNetCall) -> Tensor:
    """The embedding of the call's timestep, (batch, embedding width). An LCM's guidance embedding is included if the
    call has one and the UNet takes it."""
    time = layout.time
    waves = ops.sinusoids(call.timestep, time).to(weights[time.first.path].weight.dtype)
    if time.condition is not None and call.timestep_condition is not None:
        waves = waves + ops.linear(call.timestep_condition.to(waves.dtype), weights[time.condition.path])
    return ops.linear(ops.silu(ops.linear(waves, weights[time.first.path])), weights[time.second.path])


def block_shifts(layout: UNetLayout, weights: Weights, ops: Operators, embedding: Tensor) -> dict[str, Tensor]:
    """The vectors (batch, channels) that the residual blocks add after their first convolution: the block's projection
    of the time embedding, plus the bias of the first convolution if it has one. The convolution itself is therefore
    computed without its bias (Layers._residual_block). One product computes all projections.

    embedding: (batch, width). The keys are the paths of the blocks' projections (ResidualBlock.embedding.path).
    """
    projected = ops.linear(ops.silu(embedding), weights[layout.embeddings.name])
    blocks = layout.residual_blocks
    biases = [bias_of(weights, block.in_convolution.path) for block in blocks]
    known = next((bias for bias in biases if bias is not None), None)
    if known is not None:
        projected = projected + ops.join([
            known.new_zeros(block.embedding.out_features) if bias is None else bias
            for block, bias in zip(blocks, biases, strict=True)
        ])
    shifts = projected.split([block.embedding.out_features for block in blocks], dim=1)
    return {block.embedding.path: shift for block, shift in zip(blocks, shifts, strict=True)}


def add_residual(image: Tensor, residuals: tuple[Tensor | None, ...], index: int) -> Tensor:
    """The image plus residuals[index], as a new tensor in the image's dtype; the image itself if that residual is None
    or the index is beyond the end."""
    residual = residuals[index] if index < len(residuals) else None
    return image if residual is None else image + residual.to(image.dtype)

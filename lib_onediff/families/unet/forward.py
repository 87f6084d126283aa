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
    """Computes the whole UNet. Returns its output (see Pass.finish), and the deep feature that DeepCache (Ma et al.
    2023) reuses: the hidden states that enter the last `depth` output stages.

    depth: how many output stages, and as many input stages, are computed at every step. 0: no cut; the deep feature
        is what enters Pass.finish.
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
    """The output (see Pass.finish) of the first and last `depth` stages. deep: the deep feature of an earlier step
    (full_pass), which replaces what the stages between them would compute."""
    running = Pass(layout, weights, ops, call)
    stages = len(layout.output_stages)
    _, skips = running.encode(depth)
    hidden_states = running.decode(deep, skips, range(stages - depth, stages), None)
    return running.finish(hidden_states)


class Pass:
    """One forward pass of a call, in parts: encode, middle, decode and finish, in this order. A cached pass leaves out
    middle.

    hidden_states are (batch, channels, height, width), in the weights' dtype.
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
        """Runs the first `stages` input stages. Returns the hidden states, and one skip for each stage."""
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
        """The hidden states after the middle stage."""
        hidden_states = self.patches.before_stage(MIDDLE, 0, hidden_states)
        hidden_states = self.layers.stage(self.layout.middle_stage, hidden_states, None, (MIDDLE, 0))
        for index in range(len(self.control.middle)):
            hidden_states = add_residual(hidden_states, self.control.middle, index)
        return self.patches.after_stage(MIDDLE, 0, hidden_states)

    def decode(
        self, hidden_states: Tensor, skips: list[Tensor], stages: Iterable[int], remaining: Tensor | None
    ) -> Tensor:
        """The hidden states after the output stages of these indices.

        skips: each stage removes the last one, and takes it. remaining: the skip that the next stage after these takes,
            to whose size the last of these may have to enlarge its result; None if no stage follows.
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
        """The input of an output stage: hidden states, resized to the skip's size if it differs, and skip."""
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
    """The embedding of y, (batch, y width) -> (batch, embedding width). None if the UNet takes no y."""
    if layout.label is None or y is None:
        return None
    dtype = weights[layout.time.first.path].weight.dtype
    hidden = ops.silu(ops.linear(y.to(dtype), weights[layout.label.first.path]))
    return ops.linear(hidden, weights[layout.label.second.path])


def time_embedding(layout: UNetLayout, weights: Weights, ops: Operators, call: UNetCall) -> Tensor:
    """The embedding of the timestep, (batch, embedding width), with the guidance embedding if the call has one."""
    time = layout.time
    waves = ops.sinusoids(call.timestep, time).to(weights[time.first.path].weight.dtype)
    if time.condition is not None and call.timestep_condition is not None:
        waves = waves + ops.linear(call.timestep_condition.to(waves.dtype), weights[time.condition.path])
    return ops.linear(ops.silu(ops.linear(waves, weights[time.first.path])), weights[time.second.path])


def block_shifts(layout: UNetLayout, weights: Weights, ops: Operators, embedding: Tensor) -> dict[str, Tensor]:
    """What each residual block adds after its first convolution, (batch, channels), by the path of the block's
    projection of the time embedding: that projection of `embedding` (batch, width), plus the convolution's bias."""
    projected = ops.linear(ops.silu(embedding), weights[layout.embeddings.name])
    blocks = layout.residual_blocks
    biases = [bias_of(weights, block.in_convolution.path) for block in blocks]
    if all(bias is not None for bias in biases):
        projected = projected + ops.join([bias for bias in biases if bias is not None])
    shifts = projected.split([block.embedding.out_features for block in blocks], dim=1)
    return {block.embedding.path: shift for block, shift in zip(blocks, shifts, strict=True)}


def add_residual(image: Tensor, residuals: tuple[Tensor | None, ...], index: int) -> Tensor:
    """The image plus residuals[index], in the image's dtype; the image itself if there is none at this index."""
    residual = residuals[index] if index < len(residuals) else None
    return image if residual is None else image + residual.to(image.dtype)

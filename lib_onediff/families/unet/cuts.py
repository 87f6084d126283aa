"""The forward pass cut in two (DeepCache, Ma et al. 2023): full_pass emits the deep feature, cached_pass takes it.

depth counts the input stages, and as many output stages, that run at every step: from 1 to Family.deepest. At depth d
the deep feature is the image that enters the d-th last output stage: all that the stages below have to say.
"""
from __future__ import annotations

from torch import Tensor

from ...core.affine import Weights
from ...core.call import Call
from ...core.operators import Operators
from .forward import Pass
from .layout import UNetLayout


def full_pass(
    layout: UNetLayout, weights: Weights, ops: Operators, call: Call, depth: int
) -> tuple[Tensor, Tensor]:
    """The whole UNet; returns (output, deep feature). The output is exactly forward's."""
    running = Pass(layout, weights, ops, call)
    stages = len(layout.output_stages)
    image, skips = running.encode(len(layout.input_stages))
    shallow_skips, deep_skips = skips[:depth], skips[depth:]
    deep = running.decode(running.middle(image), deep_skips, range(stages - depth), shallow_skips[-1])
    output = running.finish(running.decode(deep, shallow_skips, range(stages - depth, stages), None))
    return output, deep


def cached_pass(
    layout: UNetLayout, weights: Weights, ops: Operators, call: Call, depth: int, deep: Tensor
) -> Tensor:
    """The outer stages only, around a deep feature from an earlier step."""
    running = Pass(layout, weights, ops, call)
    stages = len(layout.output_stages)
    _, skips = running.encode(depth)
    return running.finish(running.decode(deep, skips, range(stages - depth, stages), None))

"""Which regions a network needs, found by a forward without numbers."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...model.call import UNetCall
from ...model.forward import forward
from ...model.layout import FusedLinear, SpatialTransformer, UNetLayout
from ...model.weights import Affine, Weights
from ...ops.inductor.operators import Recorder
from ...ops.inductor.regions import Region, Shapes

# An image as the network was made for, and not square: the compiler takes sizes that are equal for one.
LATENT_SIDE = {True: 128, False: 64}
NARROWER, TOKENS, BATCH = 8, 77, 2


def regions_of(layout: UNetLayout, absent: Weights, device: torch.device, single: bool) -> dict[Region, Shapes]:
    """The regions of a network on a device, and the shapes that their compiler shall think of.

    absent: its weights without numbers. single: for batches of one.
    """
    recorder = Recorder(device)
    layout = with_shorter_transformers(layout)
    call = a_call(layout, absent[layout.out_convolution.path].weight.dtype, 1 if single else BATCH)
    with torch.no_grad():
        forward(layout, absent, recorder, call)
    return recorder.needed


def a_call(layout: UNetLayout, dtype: torch.dtype, batch: int) -> UNetCall:
    """A call of this network without numbers."""

    def of(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    side = LATENT_SIDE[layout.label is not None]
    y = None if layout.y_width is None else of(batch, layout.y_width)
    latent = of(batch, layout.in_channels, side - NARROWER, side + NARROWER)
    return UNetCall(latent, of(batch), of(batch, TOKENS, layout.context_width), y)


def weights_without_numbers(unet: nn.Module, layout: UNetLayout, dtype: torch.dtype) -> Weights:
    """The weights of a network as its layout groups them, but for their numbers (device "meta")."""

    # Every layer has a weight; what may be None is a bias.
    def of(path: str, name: str) -> Any:
        parameter = getattr(unet.get_submodule(path), name, None)
        return None if parameter is None else torch.empty_like(parameter, dtype=dtype, device="meta")

    def joined(fusion: FusedLinear, name: str) -> Any:
        members = [of(member.path, name) for member in fusion.members]
        return None if any(member is None for member in members) else torch.cat(members)

    absent = {leaf.path: Affine(of(leaf.path, "weight"), of(leaf.path, "bias")) for leaf in layout.leaves()}
    fused = {one.name: Affine(joined(one, "weight"), joined(one, "bias")) for one in layout.fusions()}
    return {**absent, **fused}


def with_shorter_transformers(node: Any) -> Any:
    """The same description with at most two blocks in every transformer: those that follow need nothing more."""
    if isinstance(node, SpatialTransformer):
        return replace(node, blocks=node.blocks[:2])
    if isinstance(node, tuple):
        return tuple(map(with_shorter_transformers, node))
    if isinstance(node, UNetLayout):
        names = ("input_stages", "middle_stage", "output_stages")
        return replace(node, **{name: with_shorter_transformers(getattr(node, name)) for name in names})
    return node

"""The operators of the inductor backend: PyTorch's, and whole regions compiled between the attentions."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..unet.layers import Layers
from ..unet.layout import Convolution, GroupNorm, ResidualBlock, SpatialTransformer, TransformerBlock, UNetLayout
from ..unet.weights import Affine, Weights
from . import Stream, torch_ops
from .compiled import CompiledRegion, Compiler
from .regions import (
    ADD,
    ENTER,
    LEAVE,
    NORM,
    SHIFTED_NORM,
    TO_CROSS,
    TO_NEXT,
    TO_SELF,
    Region,
    Site,
    name_of,
    parts,
    region_of,
    sites,
    size_to_think_of,
    tensors_of,
)


class Placed(NamedTuple):
    """A region at its place in a network."""

    compiled: CompiledRegion
    site: Site

    def run(self, weights: Weights, *inputs: Tensor) -> Any:
        kind, _, node, _ = self.site
        tensors = [as_compiled(tensor) for tensor in inputs]
        for part in parts(kind, node):
            affine = tensors_of(weights[name_of(part)], kind)
            tensors += [as_compiled(tensor) for tensor in affine if tensor is not None]
        return self.compiled(*tensors)


class Plan(NamedTuple):
    """The regions of one network for one kind of batch: each with the (height, width) to compile it for."""

    regions: dict[Region, tuple[int, int]]


class InductorOperators:
    """See ops.Operators. What was planned for a network computes it; the rest is launched as it is."""

    def __init__(self, attention: Callable[[Tensor, Tensor, Tensor, bool], Tensor] = torch_ops.attention) -> None:
        """attention: as Operators.attention."""
        self.attention = attention
        self.compiler = Compiler()
        self.compiled: dict[Region, CompiledRegion] = {}
        self._places: MutableMapping[Any, dict[tuple[str, bool], Placed]] = WeakIdKeyDictionary()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch_ops, name)

    def convolution(self, image: Tensor, affine: Affine, shape: Convolution) -> Tensor:
        return channels_last(torch_ops.convolution(channels_last(image), affine, shape))

    def plan(self, layout: UNetLayout, weights: Weights, single: bool) -> Plan:
        """Place the regions of a network for batches of one, or of more."""
        regions: dict[Region, tuple[int, int]] = {}
        for site in sites(layout):
            region = region_of(site, weights, single)
            regions[region] = max(regions.get(region, (0, 0)), size_to_think_of(layout, site.level))
            compiled = self.compiled.setdefault(region, CompiledRegion(region, self.compiler))
            self._places.setdefault(site.key, {})[site.kind, single] = Placed(compiled, site)
        return Plan(regions)

    def placed(self, kind: str, key: Any, single: bool) -> Placed:
        return self._places[key][kind, single]

    def layers(self, *given: Any) -> Layers:
        """The layers of a pass, with compiled regions."""
        return CompiledLayers(*given)

    def graphs(self) -> int:
        """How many graphs were compiled."""
        return sum(one.graphs for one in list(self.compiled.values()))

    def recompiled(self) -> int:
        """How many of them for a second time, which ought to be none."""
        return sum(max(0, one.graphs - 1) for one in list(self.compiled.values()))


@dataclass(frozen=True)
class CompiledLayers(Layers):
    """Layers that call regions of InductorOperators."""

    def __post_init__(self) -> None:
        # One copy instead of one for each block: a compiled region wants its shift to lie in one piece.
        object.__setattr__(self, "shifts", transposed(self.shifts))

    def _run(self, kind: str, key: Any, *inputs: Tensor) -> Any:
        return self.ops.placed(kind, key, inputs[0].shape[0] == 1).run(self.weights, *inputs)

    def _residual_block(self, block: ResidualBlock, image: Tensor) -> Tensor:
        weights, ops = self.weights, self.ops
        hidden = self._run(NORM, block.in_norm, channels_last(image))
        hidden = ops.convolution(hidden, Affine(weights[block.in_convolution.path].weight, None), block.in_convolution)
        hidden = self._run(SHIFTED_NORM, block.out_norm, hidden, self.shifts[block.embedding.path])
        out_weight = weights[block.out_convolution.path].weight
        hidden = ops.convolution(hidden, Affine(out_weight, None), block.out_convolution)
        skip = image if block.skip is None else ops.pointwise(image, weights[block.skip.path])
        return self._run(ADD, block.out_convolution, channels_last(skip), hidden)

    def _enter(self, transformer: SpatialTransformer, image: Tensor) -> Tensor:
        return self._run(ENTER, transformer, channels_last(image))

    def _leave(self, transformer: SpatialTransformer, image: Tensor, stream: Stream) -> Tensor:
        return self._run(LEAVE, transformer, channels_last(image), stream.tokens)

    def _before_self_attention(self, block: TransformerBlock, stream: Stream) -> tuple[Stream, Tensor]:
        return stream, self._run(TO_SELF, block, stream.tokens)

    def _before_cross_attention(
        self, block: TransformerBlock, stream: Stream, mixed: Tensor
    ) -> tuple[Stream, Tensor]:
        tokens, query = self._run(TO_CROSS, block, stream.tokens, mixed.contiguous())
        return Stream(tokens), query

    def _after_cross_attention(self, block: TransformerBlock, stream: Stream, mixed: Tensor) -> Stream:
        return Stream(self._run(TO_NEXT, block, stream.tokens, mixed.contiguous()))

    def finish(self, norm: GroupNorm, convolution: Convolution, image: Tensor) -> Tensor:
        image = self._run(NORM, norm, channels_last(image))
        return self.ops.convolution(image, self.weights[convolution.path], convolution)


def transposed(shifts: Any) -> dict[str, Tensor]:
    """Vectors (batch, channels) each as (channels, batch), in one piece of memory."""
    together = torch.cat(list(shifts.values()), dim=1)
    # Of a batch of one, torch would leave the other dimension's stride as it is.
    together = together.t().contiguous().as_strided(together.shape[::-1], (together.shape[0], 1))
    pieces: Iterable[Tensor] = together.split([shift.shape[1] for shift in shifts.values()])
    return dict(zip(shifts, pieces, strict=True))


def channels_last(image: Tensor) -> Tensor:
    """The same image with the strides that a compiled region was told."""
    batch, channels, height, width = image.shape
    wanted = (channels * height * width, 1, channels * width, channels)
    if image.stride() == wanted:
        return image
    image = image.contiguous(memory_format=torch.channels_last)
    # torch finds any stride right for a size of one; a compiler's guard does not.
    return image if image.stride() == wanted else image.as_strided(image.shape, wanted)


def as_compiled(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of the kind that was compiled for: no parameter, none of inference mode."""
    if tensor.is_inference():
        plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return plain.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return tensor.detach() if tensor.requires_grad or type(tensor) is not Tensor else tensor


def unready(operators: InductorOperators, plan: Plan) -> Iterator[tuple[CompiledRegion, tuple[int, int]]]:
    """What of a plan is not compiled yet."""
    for region, size in plan.regions.items():
        compiled = operators.compiled[region]
        if not compiled.is_ready:
            yield compiled, size

"""The sizes that a forward gives its images on their way: those of forward.Pass."""
from __future__ import annotations

from collections.abc import Iterator

from .layout import Convolution, Downsample, Layer, TransformerBlock, UNetLayout, Upsample, descriptions

Size = tuple[int, int]


def transformer_blocks(layout: UNetLayout, height: int, width: int) -> Iterator[tuple[TransformerBlock, int]]:
    """Every transformer block in the order of a forward, and how many pixels its image has.

    height, width: of the latent.
    """
    size, skips = (height, width), []
    for stage in layout.input_stages:
        for layer in stage:
            yield from blocks_of(layer, size)
            size = after(layer, size, None)
        skips.append(size)
    for layer in layout.middle_stage:
        yield from blocks_of(layer, size)
        size = after(layer, size, None)
    for stage in layout.output_stages:
        size = skips.pop()
        following = skips[-1] if skips else None
        for layer in stage:
            yield from blocks_of(layer, size)
            size = after(layer, size, following)


def blocks_of(layer: Layer, size: Size) -> Iterator[tuple[TransformerBlock, int]]:
    for block in descriptions(layer, TransformerBlock):
        yield block, size[0] * size[1]


def after(layer: Layer, size: Size, following: Size | None) -> Size:
    """The size of an image (height, width) after a layer. following: the size of the skip that the next stage takes."""
    if isinstance(layer, Upsample):
        size = following if layer.resize_before and following else (size[0] * 2, size[1] * 2)
    shape = layer.convolution if isinstance(layer, (Upsample, Downsample)) else layer
    if isinstance(shape, Convolution):
        height, width = ((side + 2 * shape.padding - shape.kernel) // shape.stride + 1 for side in size)
        return height, width
    return size

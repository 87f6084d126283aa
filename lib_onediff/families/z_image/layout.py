"""The structure of a Z-Image network: which parameter does what, without holding any."""
from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...core.family import Layout
from ...core.leaves import (
    GATED,
    AdaptiveNorm,
    Block,
    FreeParameter,
    FusedLinear,
    Linear,
    NormedHeads,
    RMSNorm,
    SelfAttention,
    SwiGLU,
    TimeEmbedding,
    TokenLinear,
    feed_forward_layers,
)
from ..rotary import RotaryAxes
from ..transformer import patch_grid


@dataclass(frozen=True)
class StreamBlock(Block):
    """A self attention and a feed-forward layer with SwiGLU, each with an RMS norm before the layer and another after
    it.

    has_image: whether the image's tokens are among the block's tokens. The timestep modulates only such blocks.
    """

    attention_norm: RMSNorm
    attention: SelfAttention
    attention_out_norm: RMSNorm
    feed_forward_norm: RMSNorm
    feed_forward_in: FusedLinear
    feed_forward_out: Linear
    feed_forward_out_norm: RMSNorm
    has_image: bool

    @property
    def token_layers(self) -> tuple[TokenLinear, ...]:
        """The linear layers whose weights may be in 8 bits, in the order of the forward. Empty for a block over the
        prompt alone, whose weights stay as they are stored."""
        if not self.has_image:
            return ()
        feed_forward = feed_forward_layers(self.feed_forward_in, self.feed_forward_out, GATED)
        return *self.attention.token_layers, *feed_forward


@dataclass(frozen=True)
class ZImageLayout(Layout):
    """A Z-Image or Lumina 2 transformer. Its first blocks refine the image's and the prompt's tokens separately, the
    later blocks all tokens together.

    patches: the linear layer over the values of a patch. patch: the patch's side in latent pixels.
    time: the embedding of the share of the image, 1 - timestep, times time_scale.
    modulations: linear layers over the time embedding, one for each block with the image's tokens: image_refiner's
        first, then those of `blocks`. Each makes scale - 1 and gate of the attention, then of the feed-forward layer.
    activates_time: whether SiLU is applied to the time embedding before `modulations`.
    text_norm, text: the norm and the linear layer that bring the prompt's tokens to the network's width.
    multiple: the image's tokens, and the prompt's, are padded to a multiple of it with the learned tokens image_pad and
        text_pad. 1 if the network does not pad: then image_pad and text_pad are None.
    image_refiner, text_refiner: the blocks over the tokens of the image alone, and of the prompt alone.
    out_modulation: makes the scale of the norm before the last layer (out) from the time embedding.
    is_negated: whether the host returns the negative of the last layer's output.
    """

    in_channels: int
    patch: int
    width: int
    context_width: int
    patches: Linear
    time: TimeEmbedding
    time_scale: float
    modulations: FusedLinear
    activates_time: bool
    text_norm: RMSNorm
    text: Linear
    image_pad: FreeParameter | None
    text_pad: FreeParameter | None
    multiple: int
    axes: RotaryAxes
    image_refiner: tuple[StreamBlock, ...]
    text_refiner: tuple[StreamBlock, ...]
    blocks: tuple[StreamBlock, ...]
    out_modulation: Linear
    out_norm: AdaptiveNorm
    out: Linear
    is_negated: bool
    model_name: str = field(default="Z-Image", compare=False)

    @cached_property
    def kernel_users(self) -> list[Any]:
        """The layers for which a device loads kernels (see Layout.kernel_users): the norm before the last layer, and an
        RMS norm, the norms of heads and the SwiGLU of the first block. That block stands for all, because they have
        equal sizes."""
        block = self.blocks[0]
        attention = block.attention
        heads = NormedHeads(attention.heads, attention.head_width, interleaved=True)
        return [block.attention_norm, self.out_norm, heads, SwiGLU(block.feed_forward_out.in_features)]

    def sized_layers(self, height: int, width: int, tokens: int) -> list[tuple[Any, tuple[int, int]]]:
        """All blocks, each with (1, tokens): the product is the number of tokens over which the block runs.

        height, width: of the latent. tokens: of the prompt, padding included.
        """
        image = self.image_tokens(height, width)
        return [
            *((block, (1, image)) for block in self.image_refiner),
            *((block, (1, tokens)) for block in self.text_refiner),
            *((block, (1, image + tokens)) for block in self.blocks),
        ]

    def image_tokens(self, height: int, width: int) -> int:
        """The number of tokens of a latent of this height and width, one for each patch, raised to a multiple of
        `multiple`."""
        rows, columns = patch_grid(height, width, self.patch)
        return rows * columns + -(rows * columns) % self.multiple

"""What a Z-Image network is, which parameter does what without holding any."""
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
    digest_without,
    feed_forward_layers,
)
from ..rotary import RotaryAxes


@dataclass(frozen=True)
class StreamBlock(Block):
    """Self attention and a feed-forward layer with SwiGLU, with a norm before and behind each. has_image: whether
    patches of the latent are among its tokens: a timestep modulates such a block."""

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
        if not self.has_image:
            return ()
        feed_forward = feed_forward_layers(self.feed_forward_in, self.feed_forward_out, GATED)
        return *self.attention.token_layers, *feed_forward


@dataclass(frozen=True)
class ZImageLayout(Layout):
    """time_scale: by which the timestep is multiplied before its sinusoids. modulations: of every block with an image,
    in their order; each gives scale, gate, scale and gate of its two layers. activates_time: whether SiLU is between
    the embedding of the timestep and these. image_pad, text_pad: the tokens that fill patches and prompt up to a
    multiple; None where the network has none. is_negated: whether the host's forward returns the negative of the last
    layer's output."""

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
    foreign: tuple[str, ...] = ()
    model_name: str = field(default="Z-Image", compare=False)

    @cached_property
    def architecture(self) -> str:
        return digest_without(self, {"path", "name", "model_name", "foreign"})

    @cached_property
    def kernel_users(self) -> list[Any]:
        block = self.blocks[0]
        attention = block.attention
        heads = NormedHeads(attention.heads, attention.head_width, interleaved=True)
        return [block.attention_norm, self.out_norm, heads, SwiGLU(block.feed_forward_out.in_features)]

    def sized_layers(self, height: int, width: int, tokens: int) -> list[tuple[Any, tuple[int, int]]]:
        """See core.family.Layout."""
        image = -(-height // self.patch) * -(-width // self.patch)
        image += -image % self.multiple
        return [
            *((block, (1, image)) for block in self.image_refiner),
            *((block, (1, tokens)) for block in self.text_refiner),
            *((block, (1, image + tokens)) for block in self.blocks),
        ]

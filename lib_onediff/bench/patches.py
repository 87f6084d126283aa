"""What people put on a UNet, to be measured as the UNet alone is: IP-Adapters, FreeU, and a function of somebody's.

Their weights are random, their architectures those of the published files.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .variants import Arguments

# The image encoder's embedding: CLIP ViT-H for SD 1.5, ViT-bigG for SDXL; Plus reads the hidden states of ViT-H.
EMBEDDING = {"sd15": 1024, "sdxl": 1280}
PLUS_WIDTH, PLUS_PATCHES, HEAD_WIDTH = 1280, 257, 64
TOKENS, PLUS_TOKENS = 4, 16
PLUS_HEADS = {"sd15": 12, "sdxl": 20}
ADAPTER_SCALE = 0.6
# As the authors recommend for SD 1.4, and for SDXL.
FREEU = {"sd15": (0.9, 0.2, 1.2, 1.4), "sdxl": (0.9, 0.2, 1.3, 1.4)}
CONTEXT_FACTOR = 1.1


class ScaledContext:
    """A processor that nobody knows: diffusers' own, with a stronger prompt."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __call__(
        self, attn: nn.Module, hidden_states: Tensor, encoder_hidden_states: Tensor, attention_mask: Any = None,
        temb: Any = None, **others: Any,
    ) -> Tensor:
        context = CONTEXT_FACTOR * encoder_hidden_states
        return self._own(attn, hidden_states, context, attention_mask, temb, **others)


def cross_attentions(unet: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in unet.named_modules() if name.endswith(".attn2")}


@contextlib.contextmanager
def ip_adapter(unet: Any, kind: str, batch: int, plus: bool = False) -> Iterator[Arguments]:
    """An IP-Adapter in every cross attention. Yields what a call brings for it."""
    from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0
    from diffusers.models.embeddings import (
        ImageProjection,
        IPAdapterPlusImageProjection,
        MultiIPAdapterImageProjection,
    )

    weight, width = next(unet.parameters()), unet.config.cross_attention_dim
    torch.manual_seed(1)
    with torch.device(weight.device):
        projection: nn.Module
        if plus:
            hidden = PLUS_HEADS[kind] * HEAD_WIDTH
            projection = IPAdapterPlusImageProjection(
                PLUS_WIDTH, width, hidden, heads=PLUS_HEADS[kind], num_queries=PLUS_TOKENS
            )
        else:
            projection = ImageProjection(EMBEDDING[kind], width, TOKENS)
        processors = {
            f"{name}.processor": IPAdapterAttnProcessor2_0(
                attention.inner_dim, width, (PLUS_TOKENS if plus else TOKENS,), [ADAPTER_SCALE]
            ) for name, attention in cross_attentions(unet).items()
        }
        embedding = torch.randn((batch, 1, PLUS_PATCHES, PLUS_WIDTH) if plus else (batch, 1, EMBEDDING[kind]))
    before = unet.attn_processors
    unet.set_attn_processor({**before, **processors})
    unet.encoder_hid_proj = MultiIPAdapterImageProjection([projection])
    unet.to(weight.dtype).eval().requires_grad_(False)
    unet.config.encoder_hid_dim_type = "ip_image_proj"
    try:
        yield {"added_cond_kwargs": {"image_embeds": [embedding]}}
    finally:
        # First: the projection of Plus has attentions of its own.
        unet.encoder_hid_proj = unet.config.encoder_hid_dim_type = None
        unet.set_attn_processor(before)


@contextlib.contextmanager
def freeu(unet: Any, kind: str, batch: int) -> Iterator[Arguments]:
    s1, s2, b1, b2 = FREEU[kind]
    unet.enable_freeu(s1=s1, s2=s2, b1=b1, b2=b2)
    try:
        yield {}
    finally:
        unet.disable_freeu()


@contextlib.contextmanager
def processor(unet: Any, kind: str, batch: int) -> Iterator[Arguments]:
    """A processor of somebody's in every cross attention."""
    before = unet.attn_processors
    unet.set_attn_processor({
        **before, **{f"{name}.processor": ScaledContext(before[f"{name}.processor"]) for name in cross_attentions(unet)}
    })
    try:
        yield {}
    finally:
        unet.set_attn_processor(before)


PATCHES: dict[str, Callable[[Any, str, int], contextlib.AbstractContextManager[Arguments]]] = {
    "IP-Adapter": ip_adapter,
    "IP-Adapter Plus": lambda unet, kind, batch: ip_adapter(unet, kind, batch, plus=True),
    "FreeU": freeu,
    "processor": processor,
}

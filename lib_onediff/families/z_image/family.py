"""The family of Z-Image, and of Lumina 2, whose network Z-Image extends."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from ...core.family import AttentionShapes, UsualSizes
from ...core.layer_weights import Weights
from ...core.leaves import names_of
from ...core.operators import Operators
from ...core.refusal import unsupported_inputs
from ..transformer import MEGAPIXEL_SIZES, SCHEDULE, blocks_read, deepest_cut
from . import forward
from .call import ZImageCall
from .layout import ZImageLayout


class ZImages:
    """The family of Z-Image's and Lumina 2's networks, one object in families.registry; implements
    core.family.Family."""

    layout = ZImageLayout
    # The timestep is the share of noise in the latent, from 1 to 0.
    first_timestep = 1.0
    schedule = SCHEDULE
    # Hosts register theirs (Families.take_reader).
    readers = ()
    usual_sizes = tuple(UsualSizes(model, (model,), MEGAPIXEL_SIZES) for model in ("Z-Image", "Lumina 2"))

    def refuse_call(self, layout: ZImageLayout, call: ZImageCall) -> None:
        """Raise Refusal if the latent or the prompt has another shape than the network takes, or if the batch sizes of
        the latent, the timestep, the prompt and its lengths differ. Called before a shape is computed for the first
        time."""
        latent = call.latent
        context = call.context
        if latent.dim() != 4 or latent.shape[1] != layout.in_channels:
            taken = f"{layout.in_channels} channels"
            raise unsupported_inputs(
                f"the latent (shape {tuple(latent.shape)}) does not fit {layout.model_name}, which takes {taken}"
            )
        if context.dim() != 3 or context.shape[-1] != layout.context_width or context.shape[1] % layout.multiple:
            taken = f"{layout.context_width} values a token, and a multiple of {layout.multiple} tokens"
            raise unsupported_inputs(
                f"the prompt (shape {tuple(context.shape)}) does not fit {layout.model_name}, which takes {taken}"
            )
        if not len(latent) == len(context) == len(call.lengths) == len(call.timestep):
            raise unsupported_inputs("the latent, the timestep and the prompt have different batch sizes")

    def example(
        self, layout: ZImageLayout, size: tuple[int, int], batch: int, tokens: int, noise: Callable[..., Tensor]
    ) -> ZImageCall:
        """A call with a latent and prompts of noise at timestep 0.5, by which a size is made ready before an image
        needs it.

        size: height and width of the latent. tokens: the length of each prompt, which is padded to a multiple of
        layout.multiple. noise(*shape): returns a tensor from a normal distribution.
        """
        latent = noise(batch, layout.in_channels, *size)
        context = noise(batch, tokens + -tokens % layout.multiple, layout.context_width)
        timestep = torch.full((batch,), self.first_timestep / 2, dtype=torch.float32, device=latent.device)
        lengths = torch.full((batch,), tokens, dtype=torch.int64, device=latent.device)
        return ZImageCall(latent, timestep, context, lengths)

    def output(self, layout: ZImageLayout, weights: Weights, ops: Operators, call: ZImageCall) -> Tensor:
        """The network's output for a call, of the latent's shape and dtype. A call with a cut also reads or writes
        call.cut.memory."""
        return forward.output(layout, weights, ops, call)

    def units(self, layout: ZImageLayout, call: ZImageCall) -> list[tuple[str, ...]]:
        """The names of the layers whose weights output() reads, in groups (units), in the order in which it reads them.
        Weights in main memory are copied to the GPU in this order, one unit ahead. A cached pass reads fewer blocks."""
        blocks = (*layout.image_refiner, *layout.text_refiner, *blocks_read(layout.blocks, call.cut))
        later = ("image_refiner", "text_refiner", "blocks", "out_modulation", "out")
        first = names_of(tuple(getattr(layout, one.name) for one in fields(layout) if one.name not in later))
        return [first, *map(names_of, blocks), names_of((layout.out_modulation, layout.out))]

    def deepest(self, layout: ZImageLayout) -> int:
        """The largest depth at which DeepCache can cut the blocks over image and prompt: one less than all; 0 if it
        cannot. The refiners are always computed."""
        return deepest_cut(layout.blocks)

    def attentions(self, layout: ZImageLayout, call: ZImageCall) -> list[AttentionShapes]:
        """The shapes of queries and keys of each kind of attention in a call, for which a device measures its kernels:
        over the image, over the prompt, and over image and prompt together."""
        height, width = call.latent.shape[-2:]
        image = layout.image_tokens(height, width)
        attention = layout.blocks[0].attention
        batch = len(call.latent)
        shapes: list[AttentionShapes] = []
        for tokens in (image, call.tokens, image + call.tokens):
            queries = batch, attention.heads, tokens, attention.head_width
            keys = batch, attention.key_heads, tokens, attention.head_width
            shapes.append(AttentionShapes(queries, keys))
        return shapes

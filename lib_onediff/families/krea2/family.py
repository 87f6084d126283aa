"""The family of Krea 2."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...core.family import AttentionShapes, UsualSizes
from ...core.layer_weights import Weights
from ...core.leaves import SelfAttention, names_of
from ...core.operators import Operators
from ...core.refusal import unsupported_inputs
from ...core.sizes import TOKENS
from ..transformer import MEGAPIXEL_SIZES, SCHEDULE, blocks_read, deepest_cut
from . import forward
from .call import MULTIPLE, Krea2Call, filled_prompt
from .layout import Krea2Layout


class Krea2s:
    """The family of Krea 2's networks, one object in families.registry; implements core.family.Family."""

    layout = Krea2Layout
    # The timestep is the share of noise in the latent, from 1 to 0.
    first_timestep = 1.0
    schedule = SCHEDULE
    # Hosts register theirs (Families.take_reader).
    readers = ()
    usual_sizes = (UsualSizes("Krea 2", ("Krea 2",), MEGAPIXEL_SIZES),)

    def refuse_call(self, layout: Krea2Layout, call: Krea2Call) -> None:
        """Raise Refusal if an input has another shape or dtype than the network takes, or the batch sizes differ.
        Called before a shape is computed for the first time."""
        latent = call.latent
        context = call.context
        batch, *others = latent.shape
        height, width = others[-2:]
        if tuple(others) not in ((layout.channels, height, width), (layout.channels, 1, height, width)):
            taken = f"{layout.channels} channels, one image"
            raise unsupported_inputs(
                f"the latent (shape {tuple(latent.shape)}) does not fit {layout.model_name}, which takes {taken}"
            )
        values = layout.text_layers * layout.text_width
        if context.dim() != 3 or context.shape[2] != values:
            taken = f"{values} values a token"
            raise unsupported_inputs(
                f"the prompt (shape {tuple(context.shape)}) does not fit {layout.model_name}, which takes {taken}"
            )
        if context.shape[0] != batch or call.timestep.shape != (batch,):
            raise unsupported_inputs("the latent, the timestep and the prompt have different batch sizes")
        if call.mask is not None and (call.mask.shape != context.shape[:2] or call.mask.dtype != torch.bool):
            raise unsupported_inputs(
                f"the prompt's mask has the shape {tuple(call.mask.shape)} and the type {call.mask.dtype}"
            )
        tokens = context.shape[1] + layout.patches_over(height, width)
        if call.positions is not None and call.positions.shape != (1, tokens, len(layout.axes.widths)):
            raise unsupported_inputs(
                f"the positions (shape {tuple(call.positions.shape)}) do not fit a sequence of {tokens} tokens"
            )

    def example(
        self, layout: Krea2Layout, size: tuple[int, int], batch: int, tokens: int, noise: Callable[..., Tensor]
    ) -> Krea2Call:
        """A call with a latent and a prompt of noise at timestep 0.5, by which a size is made ready before an image
        needs it. The call has a mask, as most calls do; no token is padding.

        size: height and width of the latent. tokens: the prompt's length in CLIP's tokens, a multiple of 77; the prompt
        has MULTIPLE tokens for each 77. noise(*shape): returns a tensor from a normal distribution.
        """
        latent = noise(batch, layout.channels, 1, *size)
        # tokens counts chunks of 77, as of CLIP. A usual prompt fits into one chunk, and into MULTIPLE tokens here.
        length = max(1, tokens // TOKENS) * MULTIPLE
        context, mask = filled_prompt(noise(batch, length, layout.text_layers * layout.text_width))
        timestep = torch.full((batch,), self.first_timestep / 2, dtype=torch.float32, device=latent.device)
        return Krea2Call(latent, timestep, context, mask)

    def output(self, layout: Krea2Layout, weights: Weights, ops: Operators, call: Krea2Call) -> Tensor:
        """The network's output for a call, of the latent's shape and dtype. A call with a cut also reads or writes
        call.cut.memory."""
        return forward.output(layout, weights, ops, call)

    def units(self, layout: Krea2Layout, call: Krea2Call) -> list[tuple[str, ...]]:
        """The names of the layers whose weights output() reads, in groups (units), in the order in which it reads them.
        Weights in main memory are copied to the GPU in this order, one unit ahead. A cached pass reads fewer blocks."""
        text = layout.text
        blocks = blocks_read(layout.blocks, call.cut)
        tables = tuple(block.table for block in blocks)
        first = names_of((layout.patches, layout.time, layout.modulation, tables, layout.out_table))
        prompt = (*text.across_layers, text.sum, *text.across_tokens, (text.norm, text.into, text.out))
        parts = (*prompt, *(block.layers for block in blocks), (layout.out_norm, layout.out))
        return [first, *map(names_of, parts)]

    def deepest(self, layout: Krea2Layout) -> int:
        """The largest depth at which DeepCache can cut the network: one block less than all; 0 if it cannot."""
        return deepest_cut(layout.blocks)

    def attentions(self, layout: Krea2Layout, call: Krea2Call) -> list[AttentionShapes]:
        """The shapes of queries and keys of each kind of attention in a call, for which a device measures its kernels:
        over image and prompt, over the prompt, and over the text encoder's layers of one token."""
        batch, tokens = call.context.shape[:2]
        height, width = call.latent.shape[-2:]
        together = tokens + layout.patches_over(height, width)
        text = layout.text
        uncertain = 0 if call.mask is None else tokens
        return [
            shapes_of(layout.blocks[0].layers.attention, batch, together, uncertain),
            shapes_of(text.across_tokens[0].attention, batch, tokens, uncertain),
            shapes_of(text.across_layers[0].attention, batch * tokens, layout.text_layers, 0),
        ]


def shapes_of(attention: SelfAttention, rows: int, tokens: int, uncertain: int) -> AttentionShapes:
    """The shapes of a self attention's queries and keys. rows: the batch size of the attention. tokens: the number in
    each row, padding included. uncertain: how many of the last ones may be padding, which the attention masks."""
    width = attention.head_width
    queries = rows, attention.heads, tokens, width
    return AttentionShapes(queries, (rows, attention.key_heads, tokens, width), uncertain)

"""The family of Anima, and of Cosmos-Predict2, which is the same network."""
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
from ..transformer import MEGAPIXEL_SIZES, SCHEDULE, blocks_read, deepest_cut, patch_grid
from . import forward
from .call import AnimaCall
from .layout import AnimaLayout

# Hosts pad shorter prompts to this number of tokens.
FEWEST_TOKENS = 512


class Animas:
    """The family of Anima's and Cosmos-Predict2's networks, one object in families.registry; implements
    core.family.Family."""

    layout = AnimaLayout
    # The timestep is the share of noise in the latent, from 1 to 0.
    first_timestep = 1.0
    schedule = SCHEDULE
    # Hosts register theirs (Families.take_reader).
    readers = ()
    usual_sizes = (UsualSizes("Anima", ("Anima",), MEGAPIXEL_SIZES),)

    def refuse_call(self, layout: AnimaLayout, call: AnimaCall) -> None:
        """Raise Refusal if the latent or the prompt has another shape than the network takes, or if the batch sizes of
        the latent, the timestep and the prompt differ. Called before a shape is computed for the first time."""
        latent = call.latent
        context = call.context
        if latent.dim() != 5 or latent.shape[1:3] != (layout.in_channels, 1):
            taken = f"{layout.in_channels} channels, one image"
            raise unsupported_inputs(
                f"the latent (shape {tuple(latent.shape)}) does not fit {layout.model_name}, which takes {taken}"
            )
        if context.dim() != 3 or context.shape[-1] != layout.context_width:
            taken = f"{layout.context_width} values a token"
            raise unsupported_inputs(
                f"the prompt (shape {tuple(context.shape)}) does not fit {layout.model_name}, which takes {taken}"
            )
        if context.shape[0] != latent.shape[0] or call.timestep.shape != latent.shape[:1]:
            raise unsupported_inputs("the latent, the timestep and the prompt have different batch sizes")

    def example(
        self, layout: AnimaLayout, size: tuple[int, int], batch: int, tokens: int, noise: Callable[..., Tensor]
    ) -> AnimaCall:
        """A call with a latent and a prompt of noise at timestep 0.5, by which a size is made ready before an image
        needs it.

        size: height and width of the latent. tokens: the prompt's length, raised to FEWEST_TOKENS if it is less.
        noise(*shape): returns a tensor from a normal distribution.
        """
        latent = noise(batch, layout.in_channels, 1, *size)
        context = noise(batch, max(tokens, FEWEST_TOKENS), layout.context_width)
        timestep = torch.full((batch,), self.first_timestep / 2, dtype=torch.float32, device=latent.device)
        return AnimaCall(latent, timestep, context)

    def output(self, layout: AnimaLayout, weights: Weights, ops: Operators, call: AnimaCall) -> Tensor:
        """The network's output for a call, of the latent's shape and dtype. A call with a cut also reads or writes
        call.cut.memory."""
        return forward.output(layout, weights, ops, call)

    def units(self, layout: AnimaLayout, call: AnimaCall) -> list[tuple[str, ...]]:
        """The names of the layers whose weights output() reads, in groups (units), in the order in which it reads them.
        Weights in main memory are copied to the GPU in this order, one unit ahead. A cached pass reads fewer blocks."""
        last = ("blocks", "out")
        first = names_of(tuple(getattr(layout, one.name) for one in fields(layout) if one.name not in last))
        return [first, *map(names_of, blocks_read(layout.blocks, call.cut)), names_of(layout.out)]

    def deepest(self, layout: AnimaLayout) -> int:
        """The largest depth at which DeepCache can cut the network: one block less than all; 0 if it cannot."""
        return deepest_cut(layout.blocks)

    def attentions(self, layout: AnimaLayout, call: AnimaCall) -> list[AttentionShapes]:
        """The shapes of queries and keys of each kind of attention in a call, for which a device measures its kernels:
        over the image, and from the image to the prompt."""
        batch = call.latent.shape[0]
        height, width = call.latent.shape[-2:]
        rows, columns = patch_grid(height, width, layout.patch)
        heads = layout.blocks[0].self_attention.heads
        head_width = layout.width // heads
        of_image = (batch, heads, rows * columns, head_width)
        of_prompt = (batch, heads, call.context.shape[1], head_width)
        return [AttentionShapes(of_image, of_image), AttentionShapes(of_image, of_prompt)]

"""The family of Stable Diffusion's UNets."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...core.family import AttentionShapes, UsualSizes
from ...core.layer_weights import Weights
from ...core.leaves import descriptions
from ...core.operators import Operators
from ...core.refusal import unsupported_inputs
from . import forward
from .call import UNetCall
from .layout import TransformerBlock, UNetLayout
from .read import is_ldm_unet, read_ldm

# The standard deviation of the noise that an example call has as its prompt. At 1, the softmax in some models chooses
# between two nearly equal tokens, so that rounding decides the output, the host's as well as ours.
PROMPT_NOISE = 0.1


class UNets:
    """The family of Stable Diffusion's UNets, one object in families.registry; implements core.family.Family."""

    layout = UNetLayout
    first_timestep = 1000.0
    schedule = "unet"
    readers = ((is_ldm_unet, read_ldm),)
    usual_sizes = (
        UsualSizes("SD 1.5", ("SD1", "SD 1.x"), (
            "512x512", "512x768", "768x512", "768x768", "1024x1024", "1024x1536", "1536x1024",
        )),
        UsualSizes("SD 2", ("SD2",), ("768x768", "1536x1536")),
        UsualSizes("SDXL", ("SDXL",), (
            "1024x1024", "1152x896", "896x1152", "1216x832", "832x1216", "1344x768", "768x1344", "1536x640",
            "640x1536", "1536x1536", "1248x1824", "1824x1248",
        )),
    )

    def refuse_call(self, layout: UNetLayout, call: UNetCall) -> None:
        """Raise Refusal if the latent is empty, if an input has another shape than the UNet takes, if y is missing, if
        y or a guidance embedding is given to a UNet that takes none, or if the batch sizes differ. A missing guidance
        embedding is accepted. Called before a shape is computed for the first time."""
        latent = call.latent
        context = call.context
        if latent.dim() != 4 or latent.shape[1] != layout.in_channels:
            raise unsupported_inputs(
                f"the latent (shape {tuple(latent.shape)}) does not fit this UNet, which takes {layout.in_channels} "
                "channels"
            )
        if not latent.numel():
            raise unsupported_inputs("the latent is empty")
        if context.dim() != 3 or context.shape[2] != layout.context_width:
            taken = f"{layout.context_width} values a token"
            raise unsupported_inputs(
                f"the prompt (shape {tuple(context.shape)}) does not fit this UNet, which takes {taken}"
            )
        if context.shape[0] != latent.shape[0] or call.timestep.shape != latent.shape[:1]:
            raise unsupported_inputs("the latent, the timestep and the prompt have different batch sizes")
        if (call.y is None) != (layout.label is None):
            lack = "the pooled prompt is missing" if call.y is None else "this UNet takes no pooled prompt"
            raise unsupported_inputs(lack)
        if call.y is not None and tuple(call.y.shape) != (latent.shape[0], layout.y_width):
            raise unsupported_inputs(
                f"the pooled prompt (shape {tuple(call.y.shape)}) does not fit this UNet, which takes "
                f"{layout.y_width} values an image"
            )
        if call.timestep_condition is not None:
            self._refuse_condition(layout, call.timestep_condition, latent.shape[0])

    def _refuse_condition(self, layout: UNetLayout, condition: Tensor, batch: int) -> None:
        """Raise Refusal if this UNet takes no guidance embedding (LCM's), or one of another shape than (batch,
        width)."""
        if layout.time.condition is None:
            raise unsupported_inputs("a guidance embedding is given, but this UNet takes none")
        width = layout.time.condition.in_features
        if tuple(condition.shape) != (batch, width):
            raise unsupported_inputs(
                f"the guidance embedding (shape {tuple(condition.shape)}) does not fit this UNet, which takes {width} "
                "values an image"
            )

    def example(
        self, layout: UNetLayout, size: tuple[int, int], batch: int, tokens: int, noise: Callable[..., Tensor]
    ) -> UNetCall:
        """A call with a latent and a prompt of noise (and y, if the UNet takes it), by which a size is made ready
        before an image needs it. The timestep is 500, where the output is about as large as the latent.

        size: height and width of the latent. tokens: of the prompt. noise(*shape): returns a tensor from a normal
        distribution.
        """
        label = None if layout.label is None else PROMPT_NOISE * noise(batch, layout.y_width)
        latent = noise(batch, layout.in_channels, *size)
        context = PROMPT_NOISE * noise(batch, tokens, layout.context_width)
        timestep = torch.full((batch,), self.first_timestep / 2, dtype=torch.float32, device=latent.device)
        return UNetCall(latent, timestep, context, label)

    def output(self, layout: UNetLayout, weights: Weights, ops: Operators, call: UNetCall) -> Tensor:
        """The network's output for a call, of the latent's height, width and dtype. A call with a cut also reads or
        writes call.cut.memory; but the cut is ignored if the call has patches, which may be in any stage."""
        cut = call.cut if call.patches is None else None
        depth = 0 if cut is None else min(cut.depth, self.deepest(layout))
        if cut is not None and cut.reads:
            return forward.cached_pass(layout, weights, ops, call, depth, cut.memory.read())
        output, deep = forward.full_pass(layout, weights, ops, call, depth)
        if cut is not None:
            cut.memory.write(deep)
        return output

    def units(self, layout: UNetLayout, call: UNetCall) -> list[tuple[str, ...]]:
        """The names of the layers whose weights output() reads, in groups (units), in the order in which it reads them.
        Weights in main memory are copied to the GPU in this order, one unit ahead. A cached pass reads fewer stages."""
        cut = call.cut if call.patches is None else None
        return layout.units(min(cut.depth, self.deepest(layout)) if cut is not None and cut.reads else None)

    def deepest(self, layout: UNetLayout) -> int:
        """The largest depth at which DeepCache can cut the UNet: a cached step leaves out at least one input stage, the
        middle stage and one output stage."""
        return len(layout.input_stages) - 1

    def attentions(self, layout: UNetLayout, call: UNetCall) -> list[AttentionShapes]:
        """The shapes of queries and keys of each kind of attention in a call, each once, in the order of first use:
        over the image and from the image to the prompt, at each size of image in the UNet. IP-Adapters' attentions are
        left out. A device measures its kernels for these shapes."""
        batch, _, height, width = call.latent.shape
        tokens = call.context.shape[1]
        found: dict[AttentionShapes, None] = {}
        for layer, size in layout.sized_layers(height, width, tokens):
            for block in descriptions(layer, TransformerBlock):
                pixels = size[0] * size[1]
                own = block.self_attention
                queries = (batch, own.heads, pixels, own.out.in_features // own.heads)
                found[AttentionShapes(queries, queries)] = None
                cross = block.cross_attention
                queries = (batch, cross.heads, pixels, cross.head_width)
                keys = (batch, cross.heads, tokens, cross.head_width)
                found[AttentionShapes(queries, keys)] = None
        return list(found)

"""Where functions of other extensions are called within our forward of a UNet."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...core.points import Points
from .layout import TransformerBlock

# The parts of a UNet; LAST is its output norm and convolution.
INPUT, MIDDLE, OUTPUT, LAST = "input", "middle", "output", "last"
SELF_ATTENTION, CROSS_ATTENTION = "attn1", "attn2"
# Where a transformer block is: the part, the index of its stage in that part, and its own index in its spatial
# transformer.
BlockPlace = tuple[str, int, int]


class PatchPoints(Points):
    """What a host's extensions have put on the UNet for one call, each called where the host's own forward would. Here,
    nothing stands at any point. See core.points.Points.

    hidden_states are (batch, channels, height, width) at stages and (batch, tokens, width) within transformers, both
    contiguous and in the weights' dtype. Every function returns what takes the place of its argument, which it may have
    written to.
    sees_stages: whether anything stands at stages, or for norms; then output stages take one tensor.
    norm: what stands for the group norms of residual blocks and of the output: called with the norm's path and
    hidden_states, it returns the normed ones. None: ours computes them.
    """

    sees_stages = False
    norm: Callable[[str, Tensor], Tensor] | None = None

    def unchanged(self, point: str, *arguments: Any) -> Any:
        return getattr(PatchPoints, point)(self, *arguments)

    def embedding(self, embedding: Tensor) -> Tensor:
        """The timestep's embedding (batch, width), before the label's is added."""
        return embedding

    def before_stage(self, part: str, index: int, hidden_states: Tensor) -> Tensor:
        """What a stage takes."""
        return hidden_states

    def after_stage(self, part: str, index: int, hidden_states: Tensor) -> Tensor:
        """What a stage returns, residuals of ControlNets added; at input stages, what the skip is made of."""
        return hidden_states

    def after_skip(self, index: int, hidden_states: Tensor) -> Tensor:
        """What goes on from an input stage, after its skip was taken."""
        return hidden_states

    def join(self, index: int, hidden_states: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        """What an output stage joins: hidden states and skip."""
        return hidden_states, skip

    def concatenate(self, index: int, hidden_states: Tensor, skip: Tensor) -> Tensor | None:
        """What an output stage takes: hidden states, resized to the skip's size, and skip: (batch, all channels,
        height, width); None where ours concatenates them."""
        return None

    def begin_block(self, place: BlockPlace, block: TransformerBlock) -> bool:
        """A transformer block begins. Returns whether anything stands in it."""
        return False

    def end_transformer(self) -> None:
        """A spatial transformer has ended."""

    def whole_block(self, block: TransformerBlock, tokens: Tensor, context: Tensor) -> Tensor | None:
        """What a transformer block makes of the tokens; None where ours computes it."""
        return None

    def self_attention_inputs(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is projected to queries, to keys and to values; normed itself, three times, where nothing stands
        there."""
        return normed, normed, normed

    def cross_attention_inputs(self, normed: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As self_attention_inputs."""
        return normed, context, context

    def whole_attention(
        self, attention: str, block: TransformerBlock, normed: Tensor, context: Tensor
    ) -> Tensor | None:
        """What an attention adds to the tokens, projections and all; None where ours computes it. normed: the tokens
        after its norm."""
        return None

    def attend(self, attention: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        """An attention over projected tokens, (batch, tokens, heads * width) each, before its output's projection; None
        where ours computes it. attention: "attn1" (self) or "attn2" (cross)."""
        return None

    def attention_output(self, attention: str, tokens: Tensor) -> Tensor:
        """An attention's projected output, before it is added."""
        return tokens

    def between_attentions(self, tokens: Tensor) -> Tensor:
        """The tokens after self attention was added."""
        return tokens

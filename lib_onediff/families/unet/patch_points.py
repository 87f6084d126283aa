"""Where functions of other extensions are called within our forward of a UNet."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...core.points import Points
from .layout import TransformerBlock

# The parts of a UNet; LAST is its output norm and convolution.
INPUT = "input"
MIDDLE = "middle"
OUTPUT = "output"
LAST = "last"
SELF_ATTENTION = "attn1"
CROSS_ATTENTION = "attn2"
# Where a transformer block is: the part, the index of its stage in that part, and its own index in its spatial
# transformer.
BlockPlace = tuple[str, int, int]


class PatchPoints(Points):
    """The points of a UNet's forward at which functions of other extensions are called. Each method is one point, where
    the host's own forward calls them too. Here, no function stands at any point. See core.points.Points.

    hidden_states are (batch, channels, height, width) at stages and (batch, tokens, width) within transformers, both
    contiguous and in the weights' dtype. Each method returns what takes the place of its argument, which functions may
    have written to.
    sees_stages: whether functions stand at stages, or in the place of norms; then output stages take one tensor.
    norm: takes the place of the group norms of residual blocks and of the output: norm(path, hidden_states) returns the
    normed hidden states. None: ours computes them.
    """

    sees_stages = False
    norm: Callable[[str, Tensor], Tensor] | None = None

    def unchanged(self, point: str, *arguments: Any) -> Any:
        return getattr(PatchPoints, point)(self, *arguments)

    def embedding(self, embedding: Tensor) -> Tensor:
        """The timestep's embedding (batch, width), before the label's is added."""
        return embedding

    def before_stage(self, part: str, index: int, hidden_states: Tensor) -> Tensor:
        """The input of a stage."""
        return hidden_states

    def after_stage(self, part: str, index: int, hidden_states: Tensor) -> Tensor:
        """The output of a stage, with the residuals of ControlNets; at input stages, the skip."""
        return hidden_states

    def after_skip(self, index: int, hidden_states: Tensor) -> Tensor:
        """The output of an input stage that the next stage takes. Its skip was taken before."""
        return hidden_states

    def join(self, index: int, hidden_states: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden states and the skip that an output stage concatenates."""
        return hidden_states, skip

    def concatenate(self, index: int, hidden_states: Tensor, skip: Tensor) -> Tensor | None:
        """The input of an output stage: the hidden states, resized to the skip's size, and the skip, concatenated to
        (batch, all channels, height, width). None: ours concatenates them."""
        return None

    def begin_block(self, place: BlockPlace, block: TransformerBlock) -> bool:
        """Called where a transformer block begins. Returns whether functions stand in it."""
        return False

    def end_transformer(self) -> None:
        """Called where a spatial transformer has ended."""

    def whole_block(self, block: TransformerBlock, tokens: Tensor, context: Tensor) -> Tensor | None:
        """The output of a transformer block for these tokens. None: ours computes it."""
        return None

    def self_attention_inputs(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs of the projections to queries, to keys and to values."""
        return normed, normed, normed

    def cross_attention_inputs(self, normed: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As self_attention_inputs."""
        return normed, context, context

    def whole_attention(
        self, attention: str, block: TransformerBlock, normed: Tensor, context: Tensor
    ) -> Tensor | None:
        """The output of an attention with its projections, to be added to the tokens. None: ours computes it. normed:
        the tokens after its norm. attention: SELF_ATTENTION or CROSS_ATTENTION."""
        return None

    def attend(self, attention: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        """The mix of values of an attention over projected tokens, (batch, tokens, heads * width) each, before the
        output's projection. None: ours computes it."""
        return None

    def attention_output(self, attention: str, tokens: Tensor) -> Tensor:
        """The output of an attention, before it is added to the tokens."""
        return tokens

    def between_attentions(self, tokens: Tensor) -> Tensor:
        """The tokens after the output of the self attention was added."""
        return tokens

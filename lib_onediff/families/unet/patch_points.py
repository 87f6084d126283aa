"""The points in our forward of a UNet at which functions of other extensions are called."""
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
# The position of a transformer block: part, index of its stage in that part, index in its spatial transformer.
BlockPlace = tuple[str, int, int]


class PatchPoints(Points):
    """The points of a UNet's forward, as core.points.Points defines them. Each method is one point. The host's forward
    calls extensions' functions at the same points. In this class no function is set at any point; hosts derive from it.

    hidden_states are (batch, channels, height, width) at stages, and tokens (batch, tokens, width) within transformers,
    both contiguous and in the weights' dtype. A method with one tensor returns the tensor with which the forward
    continues in its place; the docstrings of the other methods say what they return. Functions may have written into a
    method's arguments.

    sees_stages: whether functions are set at stages or replace norms. Then the two inputs of an output stage are
        concatenated to one tensor, as the host does, before functions get it.
    norm: norm(path, hidden_states) replaces the group norms of residual blocks and of the output, without SiLU. None:
        our forward computes them.
    """

    sees_stages = False
    norm: Callable[[str, Tensor], Tensor] | None = None

    def unchanged(self, point: str, *arguments: Any) -> Any:
        """See Points. The methods of this class itself call no function."""
        return getattr(PatchPoints, point)(self, *arguments)

    def embedding(self, embedding: Tensor) -> Tensor:
        """The timestep's embedding (batch, width), before the embedding of y is added."""
        return embedding

    def before_stage(self, part: str, index: int, hidden_states: Tensor) -> Tensor:
        """The input of a stage."""
        return hidden_states

    def after_stage(self, part: str, index: int, hidden_states: Tensor) -> Tensor:
        """The output of a stage, with residuals of ControlNets added. At an input stage, the result is its skip, too.
        """
        return hidden_states

    def after_skip(self, index: int, hidden_states: Tensor) -> Tensor:
        """The output of an input stage for the next stage alone: its skip was taken before this point."""
        return hidden_states

    def join(self, index: int, hidden_states: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden states and the skip, before an output stage concatenates them."""
        return hidden_states, skip

    def concatenate(self, index: int, hidden_states: Tensor, skip: Tensor) -> Tensor | None:
        """The input of an output stage: hidden states, resized to the skip's size, and skip, concatenated along the
        channels. None: our forward concatenates them."""
        return None

    def begin_block(self, place: BlockPlace, block: TransformerBlock) -> bool:
        """Called at the beginning of a transformer block; place and block identify it for the points within it, which
        do not get them. Returns whether functions are set within it. If True, the forward calls these points
        (whole_block to between_attentions); if False, it calls none of them for this block, and computes the block with
        fused operators."""
        return False

    def end_transformer(self) -> None:
        """Called at the end of a spatial transformer, after its last block. Hosts may count transformers for their
        functions."""

    def whole_block(self, block: TransformerBlock, tokens: Tensor, context: Tensor) -> Tensor | None:
        """The output of a transformer block for these tokens. None: our forward computes it."""
        return None

    def self_attention_inputs(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs of the projections to queries, to keys and to values."""
        return normed, normed, normed

    def cross_attention_inputs(self, normed: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs of the projections to queries, to keys and to values. If the last two are the given context
        object, our forward projects both at once."""
        return normed, context, context

    def whole_attention(
        self, attention: str, block: TransformerBlock, normed: Tensor, context: Tensor
    ) -> Tensor | None:
        """The output of a whole attention, with its projections, to be added to the tokens. None: our forward computes
        it.

        attention: SELF_ATTENTION or CROSS_ATTENTION. normed: the tokens after the norm before it.
        """
        return None

    def attend(self, attention: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        """The output of an attention before its last projection. None: our forward computes it.

        attention: SELF_ATTENTION or CROSS_ATTENTION.
        query, key, value, and the result: (batch, tokens, heads * head width).
        """
        return None

    def attention_output(self, attention: str, tokens: Tensor) -> Tensor:
        """The output of an attention after its last projection, before it is added to the tokens. attention: as in
        attend."""
        return tokens

    def between_attentions(self, tokens: Tensor) -> Tensor:
        """The tokens after the output of the self attention was added."""
        return tokens

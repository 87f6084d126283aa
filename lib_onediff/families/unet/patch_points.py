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
    calls extensions' functions at the same points. In this class no function is set at any point: its methods return
    what they get, or None. A host derives a class from it, whose methods call the functions that extensions have set.

    hidden_states are (batch, channels, height, width) at stages, and tokens (batch, tokens, width) within transformers,
    all of them contiguous and in the weights' dtype. A method that gets one tensor returns the tensor with which the
    forward continues instead; the docstrings of the other methods say what they return. Functions may write into a
    method's arguments.

    sees_stages: whether functions are set at stages or replace norms. Then hidden states and skip of each output stage
        are concatenated to one tensor for the functions, as the host does. Otherwise the device may defer the
        concatenation.
    position_points: see Points. Adapters of hosts whose options have the position override these methods.
    norm: norm(path, hidden_states) replaces the group norms of residual blocks and of the output, without SiLU. None:
        our forward computes them.
    """

    sees_stages = False
    position_points = ("before_stage", "join", "begin_block", "end_transformer")
    norm: Callable[[str, Tensor], Tensor] | None = None

    def unchanged(self, point: str, *arguments: Any) -> Any:
        """The result of the point of this name for these arguments if no function were set at it."""
        return getattr(PatchPoints, point)(self, *arguments)

    def embedding(self, embedding: Tensor) -> Tensor:
        """Called with the timestep's embedding (batch, width), before the embedding of y is added."""
        return embedding

    def before_stage(self, part: str, index: int, hidden_states: Tensor) -> Tensor:
        """Called with the input of a stage. For an output stage, that is hidden states and skip, concatenated; it is
        called there only if sees_stages, or if concatenate() has returned a tensor.
        part: INPUT, MIDDLE, OUTPUT or LAST. index: of the stage in that part."""
        return hidden_states

    def after_stage(self, part: str, index: int, hidden_states: Tensor) -> Tensor:
        """Called with the output of a stage; of an input stage or the middle stage, after the residuals of ControlNets
        were added. For an input stage, the result is also the stage's skip. part, index: as in before_stage."""
        return hidden_states

    def after_skip(self, index: int, hidden_states: Tensor) -> Tensor:
        """Called with the output of the input stage of this index, after its skip was taken: the result goes to the
        next stage alone."""
        return hidden_states

    def join(self, index: int, hidden_states: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        """Called with the hidden states and the skip before concatenate(), for every output stage. Returns the hidden
        states and the skip that are to be concatenated. The two may differ in height and width. index: of the stage."""
        return hidden_states, skip

    def concatenate(self, index: int, hidden_states: Tensor, skip: Tensor) -> Tensor | None:
        """Called instead of the concatenation before the output stage of this index. Returns the stage's input: the
        hidden states, resized to the skip's size, and the skip, concatenated along the channels. Returns None if no
        function replaces the concatenation; our forward does it then."""
        return None

    def begin_block(self, place: BlockPlace, block: TransformerBlock) -> bool:
        """Called at the beginning of a transformer block. A host's class may keep the place and the block for the
        points within the block: none of these gets the place, and only whole_block and whole_attention get the block.
        Returns whether functions are set within the block. If True, the forward calls these points
        (whole_block to between_attentions); if False, it calls none of them for this block, and computes the block with
        fused operators."""
        return False

    def end_transformer(self) -> None:
        """Called at the end of each spatial transformer, after its output was added to the image. Hosts may count
        transformers for their functions."""

    def whole_block(self, block: TransformerBlock, tokens: Tensor, context: Tensor) -> Tensor | None:
        """Called instead of a transformer block. Returns its output for these tokens, with the residual added; None if
        no function replaces the block, which our forward computes then."""
        return None

    def self_attention_inputs(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Called with the tokens after the norm before a self attention. Returns the inputs of its projections to
        queries, to keys and to values."""
        return normed, normed, normed

    def cross_attention_inputs(self, normed: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Called with the tokens after the norm before a cross attention, and with the prompt's context. Returns the
        inputs of its projections to queries, to keys and to values. If the last two are the given context object, our
        forward projects both at once."""
        return normed, context, context

    def whole_attention(
        self, attention: str, block: TransformerBlock, normed: Tensor, context: Tensor
    ) -> Tensor | None:
        """Called instead of an attention with its projections. Returns the attention's output, which our forward adds
        to the tokens: then the other points of this attention are not called. Returns None if no function replaces the
        attention, which our forward computes then.

        attention: SELF_ATTENTION or CROSS_ATTENTION. normed: the tokens after the norm before it. context: the
            prompt's.
        """
        return None

    def attend(self, attention: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        """Called instead of the softmax attention between the projections. Returns that attention's output, the input
        of the last projection; None if no function replaces the attention, which our forward computes then.

        attention: SELF_ATTENTION or CROSS_ATTENTION.
        query, key, value, and the result: (batch, tokens, heads * head width).
        """
        return None

    def attention_output(self, attention: str, tokens: Tensor) -> Tensor:
        """Called with the output of an attention after its last projection, before it is added to the tokens.
        attention: SELF_ATTENTION or CROSS_ATTENTION."""
        return tokens

    def between_attentions(self, tokens: Tensor) -> Tensor:
        """Called with a block's tokens after the output of its self attention was added."""
        return tokens

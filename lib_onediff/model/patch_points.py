"""Where functions that users have put on a UNet are called within our forward."""
from __future__ import annotations

from typing import Protocol

from torch import Tensor

INPUT, MIDDLE, OUTPUT, LAST = "input", "middle", "output", "last"
# A transformer block: in which part and stage, and the how manyth of its spatial transformer.
Block = tuple[str, int, int]


class PatchPoints(Protocol):
    """What a host's extensions have put on the UNet for one call, each called where the host's own forward would.

    hidden_states are (batch, channels, height, width) at stages and (batch, tokens, width) within transformers, both
    contiguous and in the weights' dtype. Every function returns what takes the place of its argument, which it may have
    written to.
    structure: which points there are and whose; equal for calls that compute the same way.
    sees_stages: whether before_stage or after_stage do anything, or group_norm.
    wraps_norms: whether group_norm stands for the norms of residual blocks and of the output.
    """

    structure: tuple[str, ...]
    sees_stages: bool
    wraps_norms: bool

    def begin(self, latent: Tensor) -> None:
        """A forward of this latent begins."""

    def embedding(self, embedding: Tensor) -> Tensor:
        """The timestep's embedding (batch, width), before the label's is added."""

    def before_stage(self, part: str, index: int, hidden_states: Tensor) -> Tensor:
        """What a stage takes."""

    def after_stage(self, part: str, index: int, hidden_states: Tensor) -> Tensor:
        """What a stage returns, residuals of ControlNets added; at input stages, what the skip is made of."""

    def after_skip(self, index: int, hidden_states: Tensor) -> Tensor:
        """What goes on from an input stage, after its skip was taken."""

    def join(self, index: int, hidden_states: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        """What an output stage joins: hidden states and skip."""

    def group_norm(self, path: str, hidden_states: Tensor) -> Tensor:
        """The norm of this path in the host's UNet."""

    def begin_block(self, block: Block, heads: int, head_width: int) -> bool:
        """A transformer block begins. Returns whether anything stands in it."""

    def end_transformer(self) -> None:
        """A spatial transformer has ended."""

    def self_attention_inputs(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is projected to queries, to keys and to values; normed itself, three times, where nothing stands
        there."""

    def cross_attention_inputs(self, normed: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As self_attention_inputs."""

    def replaces_attention(self, attention: str) -> bool:
        """Whether attend stands for this block's attention, "attn1" (self) or "attn2" (cross)."""

    def attend(self, attention: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """An attention over projected tokens, (batch, tokens, heads * width) each, before its output's projection."""

    def attention_output(self, attention: str, tokens: Tensor) -> Tensor:
        """An attention's projected output, before it is added."""

    def between_attentions(self, tokens: Tensor) -> Tensor:
        """The tokens after self attention was added."""

"""The protocol of families: a kind of network, how it is read, and its forward."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from .affine import Weights
from .call import UNetCall
from .leaves import FusedLinear
from .operators import Operators

# Shapes, (batch, heads, tokens, width), of an attention's queries and of its keys.
AttentionShapes = tuple[tuple[int, ...], tuple[int, ...]]


class Layout(Protocol):
    """What a network is, without any parameter: a tree of core.leaves.

    architecture: equal for networks that are the same but for their weights and names. model_name: for people.
    foreign: what others have put into the module that calls must bring as patches, each in words for the user.
    """

    foreign: tuple[str, ...]

    @property
    def architecture(self) -> str: ...

    @property
    def model_name(self) -> str: ...

    @property
    def kernel_users(self) -> Sequence[Any]:
        """Every description that decides which kernels are needed."""

    def leaves(self) -> list[Any]:
        """Every description of a module that holds parameters, each once."""

    def fusions(self) -> list[FusedLinear]:
        """Every group of linear layers that is to lie in one tensor."""

    def wider_fusions(self) -> list[FusedLinear]:
        """Groups of such groups that lie in one tensor too, where nothing is applied to their weights at each use."""

    def layers(self, kind: Any) -> Iterator[Any]:
        """Every description of this kind."""


class Family(Protocol):
    @property
    def layout(self) -> type:
        """The type of its layouts."""

    def knows(self, module: nn.Module) -> bool:
        """Whether a module is one of this family's networks, by its class and where that comes from."""

    def read(self, module: nn.Module) -> Any:
        """The layout of a module. Raises Refusal with the reason for anything that it does not know in it."""

    def refuse_call(self, layout: Any, call: UNetCall, is_embedded: bool = False) -> None:
        """Raise Refusal with the reason for inputs that cannot be this network's. is_embedded: what conditions it has
        gone into the embedding already."""

    def output(self, layout: Any, weights: Weights, ops: Operators, call: UNetCall) -> Tensor:
        """The network's output, (batch, channels, height, width) in the latent's dtype. With call.cut, hidden states
        are written to or read from its memory (see Cut). Raises RuntimeError where a cut was never written."""

    def deepest(self, layout: Any) -> int:
        """The largest depth at which it can be cut in two; 0 where it cannot."""

    def attentions(self, layout: Any, call: UNetCall) -> list[AttentionShapes]:
        """The different attentions of a call."""

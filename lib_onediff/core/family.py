"""The protocol of families: a kind of network, how it is read, and its forward."""
from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from .affine import Weights
from .call import Call
from .operators import Operators

# Shapes, (batch, heads, tokens, width), of an attention's queries and of its keys.
AttentionShapes = tuple[tuple[int, ...], tuple[int, ...]]


class Family(Protocol):
    @property
    def layout(self) -> type:
        """The type of its layouts."""

    def knows(self, module: nn.Module) -> bool:
        """Whether a module is one of this family's networks, by its class and where that comes from."""

    def read(self, module: nn.Module) -> Any:
        """The layout of a module, a frozen dataclass: a tree of core.leaves, which holds no parameter. Raises Refusal
        with the reason for anything that it does not know in it.

        It has architecture, equal for networks that are the same but for weights and names; model_name, for people;
        foreign, what others have put into the module that calls must bring as patches, in words for the user;
        kernel_users, the descriptions that decide which kernels are needed; and functions: leaves(), every description
        of a module that holds parameters, each once; fusions(), the groups of linear layers that are to lie in one
        tensor; and layers(kind), every description of this kind.
        """

    def refuse_call(self, layout: Any, call: Call) -> None:
        """Raise Refusal with the reason for inputs that cannot be this network's."""

    def output(self, layout: Any, weights: Weights, ops: Operators, call: Call) -> Tensor:
        """The network's output, (batch, channels, height, width) in the latent's dtype. With call.cut, hidden states
        are written to or read from its memory (see Cut). Raises RuntimeError where a cut was never written."""

    def units(self, layout: Any, call: Call) -> list[tuple[str, ...]]:
        """What output reads of the weights, in its order, by the names of layers, fused ones in the place of their
        members. It asks for what is in one unit once it has launched all that reads the units before, and for no matrix
        of those again."""

    def deepest(self, layout: Any) -> int:
        """The largest depth at which it can be cut in two; 0 where it cannot."""

    def attentions(self, layout: Any, call: Call) -> list[AttentionShapes]:
        """The different attentions of a call."""

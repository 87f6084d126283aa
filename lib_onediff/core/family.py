"""The protocol of families: how networks of one kind are read, and their forward."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from .call import Call
from .layer_weights import Weights
from .leaves import LEAVES, FusedLinear, descriptions, digest_without
from .operators import Operators

# A pair of functions: matches(module) returns whether a module is a network of some kind, by its class and the package
# of that; read(module) returns its layout, and raises Refusal with the reason for anything unknown in the module.
LayoutReader = tuple[Callable[[Any], bool], Callable[[Any], Any]]


# The output of a call, of a layout, its weights, operators and the call; see Family.output.
Output = Callable[[Any, Weights, Operators, Call], Tensor]


class Layout:
    """The description of a network: a frozen dataclass, a tree of core.leaves without any parameter.

    It also has model_name, for people, and sized_layers(height, width, tokens), the parts that hold all blocks, each
    with the height and width of its input. Their product is its number of rows in each image. height, width: of the
    latent. tokens: of the prompt, which a network of a single stream puts beside those of the image.
    foreign: parts of other extensions in the module, each in words for the user. The network is served only for calls
    that bring these parts, as Call.patches or as additions (Network.refuse_call).
    """

    # Fields of the layout and of its descriptions in which networks of one architecture may differ.
    ignored_fields: ClassVar[frozenset[str]] = frozenset({"path", "name", "model_name", "foreign"})
    foreign: tuple[str, ...] = ()

    @cached_property
    def architecture(self) -> str:
        """A digest of the structure: equal for networks that differ only in weights and names."""
        return digest_without(self, self.ignored_fields)

    def layers(self, kind: type | tuple[type, ...]) -> Iterator[Any]:
        """Every description of this kind, depth first in a fixed order."""
        return descriptions(self, kind)

    def leaves(self) -> list[Any]:
        """Every description of a module that holds parameters, each once."""
        return list(dict.fromkeys(self.layers(LEAVES)))

    def fusions(self) -> list[FusedLinear]:
        """The groups of linear layers that are to lie in one tensor."""
        return list(self.layers(FusedLinear))

    @property
    def kernel_users(self) -> list[Any]:
        """The descriptions that decide which kernels are needed."""
        return self.leaves()


class AttentionShapes(NamedTuple):
    """Shapes, (batch, heads, tokens, width), of an attention's queries and of its keys. is_filled: whether its rows are
    filled up (core.operators.Filled)."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    is_filled: bool = False


class UsualSizes(NamedTuple):
    """The usual sizes of one model. name: for people. models: prefixes of the model_name of its layouts. sizes: those
    that it was trained at, then those that hires fix makes of them."""

    name: str
    models: tuple[str, ...]
    sizes: tuple[str, ...]


class DecoderFamily(Protocol):
    """A kind of VAE: its decoders, which make images of latents, and its encoders.

    It is no Family: what it computes has no prompt, no timestep and no steps, and is not cut, patched or streamed.
    """

    @property
    def layout(self) -> type[Layout]:
        """The class of its layouts. A layout also has encodes, whether it is an encoder's, and reduction, the number of
        columns of its input for one of its output: 1 for a decoder, 8 for most encoders."""

    @property
    def readers(self) -> tuple[LayoutReader, ...]:
        """Of its decoders and encoders in several hosts; a host hands in others (see families.registry)."""

    def refuse_latent(self, layout: Any, latent: Tensor) -> None:
        """Raise Refusal with the reason for a latent, or an encoder's image, that cannot be this network's."""

    def output(
        self, layout: Any, weights: Weights, ops: Operators, latent: Tensor, upcast_attention: bool = False,
        fold_biases: bool = False,
    ) -> Tensor:
        """The image of a latent (batch, channels, h, w), in its dtype. For an encoder's layout, latent is an image, and
        the output is the mean and the variance of its latent.

        fold_biases: the bias of a convolution is added by the operator that follows it, which saves kernels of ours a
        pass over the image.
        """


class Family(Protocol):
    """A kind of network. The calls that it gets are of its own class, which its example returns."""

    @property
    def layout(self) -> type[Layout]:
        """The type of its layouts."""

    @property
    def first_timestep(self) -> float:
        """The timestep of pure noise, in the unit that its networks take; that of a finished image is 0."""

    @property
    def usual_sizes(self) -> tuple[UsualSizes, ...]:
        """Of each kind of model."""

    @property
    def schedule(self) -> str:
        """The table in steps/schedules.json that says which steps of its samplings are whole under DeepCache."""

    @property
    def readers(self) -> tuple[LayoutReader, ...]:
        """Of its networks in several hosts; a host hands in others (see families.registry)."""

    def refuse_call(self, layout: Any, call: Any) -> None:
        """Raise Refusal with the reason for inputs that cannot be this network's."""

    def example(
        self, layout: Any, size: tuple[int, int], batch: int, tokens: int, noise: Callable[..., Tensor]
    ) -> Call:
        """A call such as one in the middle of an image. size: height and width of the latent. tokens: the length of the
        context, 77 or a multiple; a family whose contexts are longer takes its own length. noise: draws a tensor of a
        shape from a normal distribution."""

    def output(self, layout: Any, weights: Weights, ops: Operators, call: Any) -> Tensor:
        """The network's output, of the latent's shape and dtype but for the channels. With call.cut, hidden states
        are written to or read from its memory (see Cut). Raises RuntimeError where a cut was never written."""

    def units(self, layout: Any, call: Any) -> list[tuple[str, ...]]:
        """The layers whose weights output() reads, in the order in which it reads them, in groups (units), so that
        weights in main memory can be copied ahead. Names are paths; a fused layer's name stands for its members.

        output() must keep to it: it reads no weight of a unit before it has launched all that reads the units before,
        and no matrix of an earlier unit again."""

    def deepest(self, layout: Any) -> int:
        """The largest depth at which the network can be cut in two; 0 if it cannot be cut."""

    def attentions(self, layout: Any, call: Any) -> list[AttentionShapes]:
        """The shapes of a call's attentions, each once."""

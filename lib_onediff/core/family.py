"""The protocol of a family, a kind of network: its layout, its readers and its forward."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from .call import Call
from .layer_weights import Weights
from .leaves import LEAVES, FusedLinear, descriptions, digest_without
from .operators import Operators

# A pair of functions. matches(module) returns whether the module is a network of some kind, by its class. read(module)
# returns its layout, and raises Refusal with a reason if anything in the module is unknown.
LayoutReader = tuple[Callable[[Any], bool], Callable[[Any], Any]]
# Family.output: the output of a call, from layout, weights, operators and call.
Output = Callable[[Any, Weights, Operators, Call], Tensor]


class Layout:
    """The structure of a network: a tree of the descriptions in core.leaves, without any parameter. A family's layout
    is a frozen dataclass derived from this, with two more members:

    model_name: the model, for users.
    sized_layers(height, width, tokens): the parts that contain all blocks, each with the height and width of its input,
        whose product is the number of rows that its linear layers multiply for each image. height, width: of the
        latent. tokens: of the prompt, which a single-stream network adds to the image's.

    foreign: for each part of another extension in the module, words for the user. Only calls that contain these parts,
        as Call.patches or Call.additions, are served (Network.refuse_call).
    """

    # Fields of the layout and of its descriptions in which networks of one architecture may differ.
    ignored_fields: ClassVar[frozenset[str]] = frozenset({"path", "name", "model_name", "foreign"})
    foreign: tuple[str, ...] = ()

    @cached_property
    def architecture(self) -> str:
        """A digest of the structure: equal for networks that differ only in weights and names."""
        return digest_without(self, self.ignored_fields)

    def layers(self, kind: type | tuple[type, ...]) -> Iterator[Any]:
        """All descriptions of this class, depth first in a fixed order."""
        return descriptions(self, kind)

    def leaves(self) -> list[Any]:
        """The descriptions of all modules that have parameters, each once."""
        return list(dict.fromkeys(self.layers(LEAVES)))

    def fusions(self) -> list[FusedLinear]:
        """The groups of linear layers whose weights are to be parts of one tensor."""
        return list(self.layers(FusedLinear))

    @property
    def kernel_users(self) -> list[Any]:
        """The descriptions that decide which kernels are needed."""
        return self.leaves()


class AttentionShapes(NamedTuple):
    """The shapes of an attention's queries and of its keys, (batch, heads, tokens, head width) each.

    is_filled: whether its mask is a core.operators.Filled.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    is_filled: bool = False


class UsualSizes(NamedTuple):
    """The usual image sizes of one kind of model.

    name: for users. models: its layouts have a model_name that begins with one of these.
    sizes: those that it was trained at, then usual ones of hires fix.
    """

    name: str
    models: tuple[str, ...]
    sizes: tuple[str, ...]


class DecoderFamily(Protocol):
    """A kind of VAE, with its decoders and encoders.

    It is not a Family: its networks have no prompt, no timestep and no steps, and are not cut, patched or streamed.
    """

    @property
    def layout(self) -> type[Layout]:
        """The class of its layouts. Such a layout also has encodes, whether it is an encoder's, and reduction, the
        number of columns of its input for one column of its output: 1 for a decoder, 8 for most encoders."""

    @property
    def readers(self) -> tuple[LayoutReader, ...]:
        """The readers of its modules that do not depend on one host; hosts register theirs (families.registry)."""

    def refuse_latent(self, layout: Any, latent: Tensor) -> None:
        """Raise Refusal if the network cannot take this latent, or this image with an encoder's layout."""

    def output(
        self, layout: Any, weights: Weights, ops: Operators, latent: Tensor, upcast_attention: bool = False,
        fold_biases: bool = False,
    ) -> Tensor:
        """The image of a latent (batch, channels, h, w), in its dtype. With an encoder's layout, latent is an image,
        and the output is the mean and the log variance of its latent, concatenated along the channels.

        fold_biases: add a convolution's bias in the operator that follows it. Our kernels save a pass over the image
            this way.
        """


class Family(Protocol):
    """A kind of network. Its calls have a class of their own, an instance of which example returns."""

    @property
    def layout(self) -> type[Layout]:
        """The class of its layouts."""

    @property
    def first_timestep(self) -> float:
        """The timestep of pure noise, in the unit that its networks take. The timestep of a finished image is 0."""

    @property
    def usual_sizes(self) -> tuple[UsualSizes, ...]:
        """The usual sizes of each kind of model."""

    @property
    def schedule(self) -> str:
        """The name of the table in steps/schedules.json for its networks: at which steps DeepCache computes full
        passes, and with which slope it extrapolates between them."""

    @property
    def readers(self) -> tuple[LayoutReader, ...]:
        """The readers of its networks that do not depend on one host; hosts register theirs (families.registry)."""

    def refuse_call(self, layout: Any, call: Any) -> None:
        """Raise Refusal if the network cannot take the inputs of this call, such as a prompt of another width."""

    def example(
        self, layout: Any, size: tuple[int, int], batch: int, tokens: int, noise: Callable[..., Tensor]
    ) -> Call:
        """A call with random inputs, as half-way through a sampling.

        size: height and width of the latent. tokens: the length of the prompt in tokens of CLIP, a multiple of 77; a
            family whose prompts have other lengths uses the one that corresponds to it.
        noise: returns a tensor of the given shape from a normal distribution.
        """

    def output(self, layout: Any, weights: Weights, ops: Operators, call: Any) -> Tensor:
        """The network's output, of the latent's shape and dtype; the number of channels may differ.

        With call.cut, hidden states are written to, or read from, its memory (see Cut). Raises RuntimeError if a call
        reads memory that was never written.
        """

    def units(self, layout: Any, call: Any) -> list[tuple[str, ...]]:
        """The layers whose weights output() reads, in groups (units), in the order of the reads, so that weights in
        main memory can be copied ahead. Each layer is named by its path, and a fused layer by its name.

        output() must follow this order: it reads a unit's weights only after it has launched everything that reads the
        units before, and reads no matrix of an earlier unit again.
        """

    def deepest(self, layout: Any) -> int:
        """The largest depth at which the network can be cut (see Cut); 0 if it cannot be cut."""

    def attentions(self, layout: Any, call: Any) -> list[AttentionShapes]:
        """The shapes of all attentions of a call, each once."""

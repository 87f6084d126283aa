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

# A pair of functions (matches, read). matches(module) returns whether the module is a network of some kind, by its
# class. read(module) returns its layout, and raises Refusal with a reason if anything in the module is unknown.
LayoutReader = tuple[Callable[[Any], bool], Callable[[Any], Any]]
# The signature of Family.output.
Output = Callable[[Any, Weights, Operators, Call], Tensor]


class Layout:
    """The structure of a network: a tree of the descriptions in core.leaves, without any parameter. A family's layout
    is a frozen dataclass derived from this, with two more members:

    model_name: the model, for users, such as "SDXL".
    sized_layers(height, width, tokens): (part, (part's height, part's width)) pairs: the parts of the layout that
        contain all blocks, each with the size of its input. The part's height times its width is the number of rows
        that its linear layers multiply for each image. height, width: of the latent. tokens: of the prompt, which a
        single-stream network adds to the image's tokens.

    foreign: words for the user for each part that another extension has added to the module. Calls of such a network
        are served only if they contain these parts too, as Call.patches or Call.additions (Network.refuse_call).
    """

    # Names of fields, of the layout and of its descriptions, in which networks of one architecture may differ.
    ignored_fields: ClassVar[frozenset[str]] = frozenset({"path", "name", "model_name", "foreign"})
    foreign: tuple[str, ...] = ()

    @cached_property
    def architecture(self) -> str:
        """A digest of the structure, 16 hex digits: equal for networks that differ only in weights and names. Such
        networks share graphs' memory and entries of the table of shapes."""
        return digest_without(self, self.ignored_fields)

    def layers(self, kind: type | tuple[type, ...]) -> Iterator[Any]:
        """All descriptions (core.leaves) of this class in the layout, depth first in the order of the fields."""
        return descriptions(self, kind)

    def leaves(self) -> list[Any]:
        """The descriptions of all modules that have parameters, each once."""
        return list(dict.fromkeys(self.layers(LEAVES)))

    def fusions(self) -> list[FusedLinear]:
        """The groups of linear layers that are computed as one. The binding makes the weights of each group parts of
        one tensor."""
        return list(self.layers(FusedLinear))

    @property
    def kernel_users(self) -> list[Any]:
        """The descriptions that decide, by their class and sizes, which kernels a device has to load for this network:
        norms, norms of heads (NormedHeads), gates (SwiGLU, SigmoidGate) and cross attentions. A device ignores
        descriptions of other classes in the list, such as Linear.

        By default all leaves. A family overrides this if it has such descriptions without parameters, such as SwiGLU.
        Of layers with equal sizes, one is enough, so one block may stand for all of its kind."""
        return self.leaves()


class AttentionShapes(NamedTuple):
    """The shapes of an attention's queries, and of its keys and values: (batch, heads, tokens, head width) each. A
    device measures its fastest attention kernel for them.

    uncertain: how many of the last tokens of each row may be padding, if the attention's mask is a
    core.operators.Filled; otherwise 0.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    uncertain: int = 0


class UsualSizes(NamedTuple):
    """The usual image sizes of one kind of model, which users can choose to pre-warm.

    name: the kind, for users. models: the beginnings of the Layout.model_name of its networks.
    sizes: in pixels, as "1024x1024": those that it was trained at, then usual ones of hires fix.
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
        """The class of its layouts. They have two more fields. encodes: whether the network is an encoder. reduction:
        how many columns of the input make one column of its output: 8 for most encoders, 1 for a decoder."""

    @property
    def readers(self) -> tuple[LayoutReader, ...]:
        """The readers of its modules that do not depend on one host; hosts register theirs (families.registry)."""

    def refuse_latent(self, layout: Any, latent: Tensor) -> None:
        """Raise Refusal if the network cannot take this latent. With an encoder's layout, latent is an image."""

    def output(
        self, layout: Any, weights: Weights, ops: Operators, latent: Tensor, upcast_attention: bool = False,
        fold_biases: bool = False,
    ) -> Tensor:
        """The image of a latent (batch, channels, h, w), in its dtype. With an encoder's layout, latent is an image,
        and the output is the mean and the log variance of its latent, concatenated along the channels.

        upcast_attention: compute attention scores in float32.
        fold_biases: leave a convolution's bias to the operator that follows it, which adds it as it reads the image.
            This saves a pass over the image with our kernels; the result is the same to within rounding.
        """


class Family(Protocol):
    """A kind of denoising network, such as the UNet. It has its own class of calls, derived from core.call.Call."""

    @property
    def layout(self) -> type[Layout]:
        """The class of its layouts."""

    @property
    def first_timestep(self) -> float:
        """The timestep of pure noise, in the unit that its networks take: 1000, or 1 for flow models. The timestep of a
        finished image is 0."""

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
        """A call with random inputs and the timestep of the middle of a sampling, for warm-ups and measurements.

        size: height and width of the latent. tokens: the length of the prompt in tokens of CLIP, a multiple of 77; a
            family whose prompts have other lengths uses the one that corresponds to it.
        noise: called as noise(*shape); returns a tensor from a normal distribution, whose dtype and device are the
            call's.
        """

    def output(self, layout: Any, weights: Weights, ops: Operators, call: Any) -> Tensor:
        """The network's output, of the latent's shape and dtype; the number of channels may differ.

        layout: a Layout of this family. weights: by path or name (Source.weights). call: of this family's class. With
        call.cut, hidden states are written to, or read from, its memory (see Cut). Raises RuntimeError if a call reads
        memory that was never written.
        """

    def units(self, layout: Any, call: Any) -> list[tuple[str, ...]]:
        """Groups (units) of the layers whose weights output() reads for this call, in the order of the reads, so that
        weights in main memory can be copied to the GPU ahead. A layer is given by its key in Weights: its path, or a
        fused layer's name.

        output() must follow this order: it reads a unit's weights only after it has launched everything that reads the
        units before, and reads no matrix of an earlier unit again, because its copy is overwritten.
        """

    def deepest(self, layout: Any) -> int:
        """The largest depth at which the network can be cut (see Cut); 0 if it cannot be cut."""

    def attentions(self, layout: Any, call: Any) -> list[AttentionShapes]:
        """The shapes of all attentions of a call, each different one once, for Device.tune."""

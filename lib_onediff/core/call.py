"""What one call of a UNet is, whichever host makes it: its inputs, where functions that users have put on the UNet are
called within our forward, and some of its rows alone: a UNet computes each row of its batch by itself."""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .fields import ANY_DTYPE, LEFT_OUT, named_tensors, shapes_of, signature_function, walked_names
from .leaves import TransformerBlock
from .precision import autocast_dtype

# Of every family's calls.
BASE_INPUTS = ("latent", "timestep", "upcast_attention", "cut")
INPUT, MIDDLE, OUTPUT, LAST = "input", "middle", "output", "last"
# A transformer block: in which part and stage, and the how manyth of its spatial transformer.
Block = tuple[str, int, int]
SELF_ATTENTION, CROSS_ATTENTION = "attn1", "attn2"
FULL, CACHED = "full", "cached"
# Why the prompt's rows of a call are not known, in words for the user, whatever the host.
APART = "prompt and negative prompt come in separate calls, or there is no negative prompt"
OTHER_ROWS = "the call has rows besides those of prompt and negative prompt (tiles?)"
# Why they cannot be computed alone.
PATCHED = "other extensions compute within the UNet"


class PatchPoints:
    """What a host's extensions have put on the UNet for one call, each called where the host's own forward would. Here,
    nothing stands at any point.

    hidden_states are (batch, channels, height, width) at stages and (batch, tokens, width) within transformers, both
    contiguous and in the weights' dtype. Every function returns what takes the place of its argument, which it may have
    written to.
    structure: which points there are and whose; equal for calls that compute the same way.
    places: where anything stands; equal for calls whose functions are called at the same points.
    functions: every function that is called in this call; see verify.rewinder_of.
    sees_stages: whether anything stands at stages, or for norms; then output stages take one tensor.
    norm: what stands for the group norms of residual blocks and of the output: called with the norm's path and
    hidden_states, it returns the normed ones. None: ours computes them.
    """

    structure: tuple[str, ...] = ()
    places: object = ()
    functions: Collection[Any] = ()
    sees_stages = False
    norm: Callable[[str, Tensor], Tensor] | None = None

    def stands(self, point: str, *arguments: Any) -> bool:
        """Whether the method of this name calls a function, or may, when it is called with these arguments now. Calls
        whose patches do not override this are not captured as CUDA graphs."""
        return True

    def begin(self, latent: Tensor) -> None:
        """A forward of this latent begins."""

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

    def begin_block(self, place: Block, block: TransformerBlock) -> bool:
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


class CutMemory:
    """What crosses a cut, hidden states (batch, channels, height, width), in memory that stays where it is as long as
    the shape does: a captured graph knows the address alone."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def write(self, hidden_states: Tensor) -> None:
        """Keep these. Raises RuntimeError if memory for them would be needed during a capture."""
        kept = self.tensor
        wanted = hidden_states.shape, hidden_states.dtype, hidden_states.device
        if kept is None or (kept.shape, kept.dtype, kept.device) != wanted:
            if hidden_states.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("a cut must have its memory before a graph writes it")
            self.tensor = kept = torch.empty_like(hidden_states)
        kept.copy_(hidden_states)

    def read(self) -> Tensor:
        """The hidden states, as a tensor of its own: what operators know of these, they must not know of the next in
        the same memory. Raises RuntimeError before the first write."""
        if self.tensor is None:
            raise RuntimeError("nothing has been written at this cut yet")
        return self.tensor.detach()

    @property
    def bytes(self) -> int:
        return 0 if self.tensor is None else self.tensor.nbytes


@dataclass(frozen=True)
class Cut:
    """The network cut in two: the inner part, and the outer stages around it.

    depth: how many input stages, and as many output stages, are the outer part. reads: compute the outer part alone,
    around what an earlier call has written to memory; otherwise compute everything, and write it. values: the
    version of the weights' values that have written what is read (Epoch.values).
    """

    depth: int
    reads: bool
    memory: CutMemory = field(metadata=LEFT_OUT)
    values: int = field(default=-1, metadata=LEFT_OUT)

    @property
    def name(self) -> str:
        return CACHED if self.reads else FULL


@dataclass(frozen=True)
class Control:
    """Residuals from a ControlNet or T2I adapter, each (batch, channels, height, width) or None.

    input[i] is added to what input stage i returns (so the stages after it and its skip both see it), every residual
    of middle to what the middle stage returns, output[i] to the skip that output stage i takes. A tuple may be
    shorter than the number of stages.
    """

    input: tuple[Tensor | None, ...] = ()
    middle: tuple[Tensor | None, ...] = ()
    output: tuple[Tensor | None, ...] = ()


@dataclass(frozen=True)
class ImagePrompt:
    """What an IP-Adapter (Ye et al. 2023, arXiv 2308.06721) adds to cross attentions: a second attention, from the same
    queries to the tokens of an image.

    key_values: (batch, tokens, sum of the widths of all parts); of each part keys, then values. The adapter's scale is
    a factor of the values.
    parts: first column and width of each cross attention's part, by the path of its query.
    structure: what is added where, in words; equal for image prompts that are computed the same way.
    """

    key_values: Tensor
    parts: Mapping[str, tuple[int, int]] = field(metadata=LEFT_OUT)
    structure: str = field(init=False)

    def __post_init__(self) -> None:
        which = hashlib.sha256("\n".join(sorted(self.parts)).encode()).hexdigest()[:8]
        tokens = self.key_values.shape[1] if self.key_values.dim() > 1 else 0
        structure = f"an image prompt of {tokens} tokens in {len(self.parts)} attentions ({which})"
        object.__setattr__(self, "structure", structure)

    def key_value(self, query_path: str) -> tuple[Tensor, Tensor] | None:
        """Keys and values for a cross attention, (batch, tokens, width) each; None where the adapter leaves it
        alone."""
        part = self.parts.get(query_path)
        if part is None:
            return None
        key, value = self.key_values.narrow(-1, *part).chunk(2, dim=-1)
        return key, value


@dataclass(frozen=True)
class Call:
    """The inputs of one denoising call.

    latent: (batch, channels, height, width), in latent pixels; (batch, channels, 1, height, width) of a network that is
        for videos too.
    timestep: (batch,), float or integer, from 0 to Family.first_timestep; may be fractional.
    context: (batch, tokens, width): the text encoder's output.
    y: (batch, width) pooled text and size embedding of SDXL-like models, else None.
    timestep_condition: (batch, width) guidance embedding of LCM-distilled models, else None.
    control: residuals to add, else None.
    upcast_attention: compute attention scores in float32 (SD2.1 overflows in float16).
    cut: where the UNet is cut in two for this call, else None.
    patches: functions of other extensions that run within it, else None.
    image_prompts: what IP-Adapters add.
    """

    latent: Tensor
    timestep: Tensor = field(metadata=ANY_DTYPE)
    context: Tensor
    y: Tensor | None = None
    timestep_condition: Tensor | None = None
    control: Control | None = None
    upcast_attention: bool = False
    cut: Cut | None = None
    patches: PatchPoints | None = field(default=None, metadata=LEFT_OUT)
    image_prompts: tuple[ImagePrompt, ...] = ()

    @property
    def additions(self) -> tuple[str, ...]:
        """What our forward computes besides the UNet's own layers; equal for calls that compute the same way."""
        return tuple(prompt.structure for prompt in self.image_prompts)

    @property
    def signature(self) -> Hashable:
        """Equal for calls of one network whose inputs have the same shapes and types and lie on the same devices;
        microseconds. Functions of other extensions are not part of it."""
        kind: Any = type(self)
        return signature_function(kind)(self)

    @property
    def own_inputs(self) -> tuple[tuple[str, Hashable], ...]:
        """The shapes and plain values of the inputs that only calls of this family have, by name, without those that
        are None or empty."""
        kind: Any = type(self)
        own = (name for name in walked_names(kind) if name not in BASE_INPUTS)
        shapes = [(name, shapes_of(getattr(self, name))) for name in own]
        return tuple((name, shape) for name, shape in shapes if shape not in (None, ()))

    @property
    def label(self) -> str:
        """Words for users that tell this call from usual ones of its size, such as "with control"."""
        return "with control" if self.control else ""

    @property
    def unusual(self) -> tuple[str, ...]:
        """The inputs whose type or device is not the latent's, in words for a shape's key: a host may refuse them, or
        compute with them in another way. Every host casts the timestep to float32, so its type is left out."""
        latent = self.latent
        found: dict[str, None] = {}
        for name, tensor in named_tensors(self):
            dtype = latent.dtype if tensor is self.timestep else tensor.dtype
            if dtype != latent.dtype or tensor.device != latent.device:
                words = name.replace("_", " ")
                found[f"{words} in {str(dtype).removeprefix('torch.')} on {tensor.device}"] = None
        if not found:
            return ()
        # What autocast lets pass, a host refuses without it.
        autocast = autocast_dtype(latent.device.type)
        return tuple(found) if autocast is None else (*found, f"autocast to {autocast}")


class PromptRows(NamedTuple):
    """Which rows of a call are the prompt's, half of them; the others are the negative prompt's, in the same order.

    host: the host's own forward of a call of the prompt's rows alone.
    """

    rows: slice
    host: Callable[[], Tensor]


def half_of(batch: int, is_first: bool) -> slice:
    """The first or the second half of a batch."""
    return slice(0, batch // 2) if is_first else slice(batch // 2, batch)


def why_not_taken(call: Call) -> str:
    """Why rows of this call cannot be computed alone, in words for the user; "" where they can."""
    return "" if call.patches is None else PATCHED

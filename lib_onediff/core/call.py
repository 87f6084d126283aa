"""What one call of a network is, whichever host makes it: the inputs that every family has, and some of its rows alone:
a network computes each row of its batch by itself."""
from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .fields import ANY_DTYPE, LEFT_OUT, any_dtype_names, named_tensors, shapes_of, signature_function, walked_names
from .points import Points
from .precision import autocast_dtype

FULL = "full"
CACHED = "cached"
# Why the prompt's rows of a call are not known, in words for the user, whatever the host.
APART = "prompt and negative prompt come in separate calls, or there is no negative prompt"
OTHER_ROWS = "the call has rows besides those of prompt and negative prompt (tiles?)"
# Why rows of a call cannot be computed alone, in words for the user.
PATCHED = "other extensions compute within the network"


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
        """The hidden states, as a new tensor object over this memory: operators may keep facts about a tensor object,
        and these must not be taken for facts about what is written here next. Raises RuntimeError before the first
        write."""
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
    around what an earlier call has written to memory; otherwise compute everything, and write it. values: of a
    cut that reads, Epoch.values at the whole pass that wrote its memory.
    """

    depth: int
    reads: bool
    memory: CutMemory = field(metadata=LEFT_OUT)
    values: int = field(default=-1, metadata=LEFT_OUT)

    @property
    def name(self) -> str:
        return CACHED if self.reads else FULL


@dataclass(frozen=True)
class Call:
    """The inputs of one denoising call: those of every family. A family's own call is a frozen dataclass derived from
    this, whose fields core.fields walks: a further field needs no other line.

    latent: (batch, channels, height, width), in latent pixels; (batch, channels, 1, height, width) of a network that is
        for videos too.
    timestep: (batch,), float or integer, from 0 to Family.first_timestep; may be fractional.
    upcast_attention: compute attention scores in float32 (SD2.1 overflows in float16).
    cut: where the network is cut in two for this call, else None.
    patches: functions of other extensions that run within it, else None.
    """

    latent: Tensor
    timestep: Tensor = field(metadata=ANY_DTYPE)
    upcast_attention: bool = field(default=False, kw_only=True)
    cut: Cut | None = field(default=None, kw_only=True)
    patches: Points | None = field(default=None, kw_only=True, metadata=LEFT_OUT)

    @property
    def prompt(self) -> tuple[Tensor, ...]:
        """The tensors that tell the prompts of two calls apart, in the order in which a host's forward takes them."""
        return ()

    @property
    def tokens(self) -> int:
        """How long the prompt is, as the network gets it."""
        return self.prompt[0].shape[1] if self.prompt else 0

    @property
    def additions(self) -> tuple[str, ...]:
        """What our forward computes besides the network's own layers, in words for a shape's key, one for each; equal
        for calls that compute the same way."""
        return ()

    @property
    def label(self) -> str:
        """Words for users that tell this call from usual ones of its size, such as "with control"."""
        return ""

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
        of_all: Any = Call
        own = (name for name in walked_names(kind) if name not in walked_names(of_all))
        shapes = [(name, shapes_of(getattr(self, name))) for name in own]
        return tuple((name, shape) for name, shape in shapes if shape not in (None, ()))

    @property
    def unusual(self) -> tuple[str, ...]:
        """The inputs whose type or device is not the latent's, in words for a shape's key: a host may refuse them, or
        compute with them in another way. The types of those that may be of any are left out: every host casts the
        timestep to float32."""
        latent = self.latent
        kind: Any = type(self)
        of_any_dtype = any_dtype_names(kind)
        found: dict[str, None] = {}
        for name, tensor in named_tensors(self):
            dtype = latent.dtype if name in of_any_dtype else tensor.dtype
            if dtype != latent.dtype or tensor.device != latent.device:
                words = name.replace("_", " ")
                found[f"{words} in {str(dtype).removeprefix('torch.')} on {tensor.device}"] = None
        if not found:
            return ()
        # Under autocast a host takes other types than without it, so autocast's type is part of the words.
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


def why_rows_stay_together(call: Call) -> str:
    """Why rows of this call cannot be computed alone, in words for the user; "" where they can."""
    return "" if call.patches is None else PATCHED

"""One call of a network: the inputs that all families have, and which rows of the batch are the prompt's."""
from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .fields import ANY_DTYPE, LEFT_OUT, any_dtype_names, named_tensors, shapes_of, signature_function, walked_names
from .points import Points
from .precision import autocast_dtype

# The passes of a network that DeepCache cuts (see Cut).
FULL = "full"
CACHED = "cached"
# Reasons, for users, why it is unknown which rows of a call are the prompt's.
APART = (
    "the prompt and the negative prompt are computed in separate calls (A1111: switch on 'Batch cond/uncond'; Forge: "
    "free VRAM), or the negative prompt is not computed at all (CFG scale 1?)"
)
OTHER_ROWS = "the step also computes images that belong to neither the prompt nor the negative prompt (tiles?)"
# The reason, for users, why some rows of a call cannot be computed without the others.
PATCHED = "other extensions compute inside the model"


class CutMemory:
    """The hidden states that a full pass writes at a cut and cached passes read. Their address stays the same as long
    as their shape, dtype and device do, since captured graphs contain it. tensor: the memory; None before the first
    write."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def write(self, hidden_states: Tensor) -> None:
        """Copy hidden states into the memory. It is allocated here at the first write, and anew when the shape, dtype
        or device changes. Raises RuntimeError if it would have to be allocated during the capture of a CUDA graph."""
        kept = self.tensor
        wanted = hidden_states.shape, hidden_states.dtype, hidden_states.device
        if kept is None or (kept.shape, kept.dtype, kept.device) != wanted:
            if hidden_states.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("a cut must have its memory before a graph writes it")
            self.tensor = kept = torch.empty_like(hidden_states)
        kept.copy_(hidden_states)

    def read(self) -> Tensor:
        """The hidden states, not copied: a later write changes them. Raises RuntimeError before the first write.

        Each call returns a new tensor object over the same memory, because operators may remember facts about the
        contents by tensor object, such as a norm's statistics, and those would be wrong after the next write.
        """
        if self.tensor is None:
            raise RuntimeError("nothing has been written at this cut yet")
        return self.tensor.detach()

    @property
    def bytes(self) -> int:
        """The size of the memory; 0 before the first write."""
        return 0 if self.tensor is None else self.tensor.nbytes


@dataclass(frozen=True)
class Cut:
    """Where DeepCache cuts a network, and whether this call is a full or a cached pass.

    depth: of a UNet, how many of the first input stages, and of the last output stages, every pass computes; of a
        transformer, how many of the first blocks.
    reads: True is a cached pass: it computes only the stages or blocks that `depth` counts, with the hidden states in
        `memory`. False is a full pass: it computes everything, and writes hidden states to `memory`.
    values: for a cached pass, Epoch.values at the full pass that wrote the memory; a full pass does not use it.
    """

    depth: int
    reads: bool
    memory: CutMemory = field(metadata=LEFT_OUT)
    values: int = field(default=-1, metadata=LEFT_OUT)

    @property
    def name(self) -> str:
        """CACHED or FULL."""
        return CACHED if self.reads else FULL


@dataclass(frozen=True)
class Call:
    """The inputs of one denoising call that all families have. A family derives a frozen dataclass with its further
    inputs; core.fields finds them by the dataclass's fields.

    latent: (batch, channels, height, width), or (batch, channels, 1, height, width) for a network that can make videos.
    timestep: float or integer (batch,), from 0 to Family.first_timestep; may be fractional.
    upcast_attention: compute attention scores in float32 (SD2.1 overflows in float16).
    cut: DeepCache's cut; None without it.
    patches: functions of other extensions that run within the network; None without any.
    """

    latent: Tensor
    timestep: Tensor = field(metadata=ANY_DTYPE)
    upcast_attention: bool = field(default=False, kw_only=True)
    cut: Cut | None = field(default=None, kw_only=True)
    patches: Points | None = field(default=None, kw_only=True, metadata=LEFT_OUT)

    @property
    def prompt(self) -> tuple[Tensor, ...]:
        """The inputs that depend on the prompt, in the order of the host's arguments: two calls have the same prompt if
        these are equal. The first one is the text encoder's output, (batch, tokens, width). () if the network takes no
        prompt."""
        return ()

    @property
    def tokens(self) -> int:
        """The number of tokens of the prompt as the network gets it, padding included; 0 without a prompt."""
        return self.prompt[0].shape[1] if self.prompt else 0

    @property
    def additions(self) -> tuple[str, ...]:
        """Words for ShapeKey.additions: one for each computation of this call besides the network's own layers, such as
        an IP-Adapter's image prompt. () for none. Calls that are computed differently must have different words."""
        return ()

    @property
    def label(self) -> str:
        """Words for users by which this call differs from usual ones of its size, such as "with control"; "" for none.
        """
        return ""

    @property
    def signature(self) -> Hashable:
        """A hashable that is equal for two calls of one network if their inputs have the same shapes, dtypes and
        devices and the same plain values. The runtime finds a call's plan by it. It does not include functions of other
        extensions (patches). Takes microseconds."""
        kind: Any = type(self)
        return signature_function(kind)(self)

    @property
    def own_inputs(self) -> tuple[tuple[str, Hashable], ...]:
        """(name, value) pairs of the inputs that only this family's calls have, for ShapeKey.own_inputs. value: the
        shape of a tensor, nested tuples of shapes for several, or the plain value itself. Inputs that are None or ()
        are left out."""
        kind: Any = type(self)
        of_all: Any = Call
        own = (name for name in walked_names(kind) if name not in walked_names(of_all))
        shapes = [(name, shapes_of(getattr(self, name))) for name in own]
        return tuple((name, shape) for name, shape in shapes if shape not in (None, ()))

    @property
    def unusual(self) -> tuple[str, ...]:
        """Words for ShapeKey.inputs, such as "context in float32 on cuda:0": one for each input whose dtype or device
        is not the latent's, because a host may refuse it, or compute with it in another way. If there is such an input
        and autocast is on, one more names autocast's dtype. () if all inputs are alike, also under autocast.

        Dtypes of fields marked ANY_DTYPE are ignored, such as the timestep's, which every host casts to float32."""
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
        # Under autocast, a host takes other dtypes than without it, so autocast's dtype is part of the words.
        autocast = autocast_dtype(latent.device.type)
        return tuple(found) if autocast is None else (*found, f"autocast to {autocast}")


class PromptRows(NamedTuple):
    """The half of a call's rows (of the batch) that is the prompt's. The other half is the negative prompt's, in the
    same order of images.

    rows: the first or the second half of the batch, as a slice of its indices.
    host: returns the host's own output for the prompt's rows alone.
    """

    rows: slice
    host: Callable[[], Tensor]


def half_of(batch: int, is_first: bool) -> slice:
    """The rows of the first or the second half of a batch. batch: the number of rows, which must be even."""
    return slice(0, batch // 2) if is_first else slice(batch // 2, batch)


def why_rows_stay_together(call: Call) -> str:
    """Why a part of this call's rows cannot be computed without the others, in words for the user; "" if it can.
    Functions of other extensions get whole batches, and may mix the rows."""
    return "" if call.patches is None else PATCHED

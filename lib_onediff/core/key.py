"""What makes two UNet calls, or two decodes, the same shape."""
from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .call import CACHED, Call
from .precision import Flags

LATENT_PIXEL = 8
# In a key's inputs: not a call of the UNet but a decode of the VAE.
DECODE = "vae decode"


class Lossy(NamedTuple):
    """What is computed less exactly than the model's type allows, because the user asked for it.

    low_bit: as settings.Settings.low_bit; "" where every product is exact. only: whether the GPU holds the weights of
    those products in eight bits alone.
    """

    low_bit: str = ""
    only: bool = False

    def __str__(self) -> str:
        """For users, behind the backend's name."""
        if self.only:
            return "8-bit only"
        return "8-bit" if self.low_bit else ""


LOSSLESS = Lossy()


@dataclass(frozen=True)
class ShapeKey:
    """Everything that decides whether a captured or compiled forward serves a call. Weights are not part of it.

    inputs: words: Call.unusual; of a decode, DECODE comes first. weights: words: Network.weight_marks. own_inputs:
    shapes of the inputs that only this family's calls have; see Call.own_inputs. label: see Call. backend: the device
    that computes it, so that a shape that fails by one can be served by another. precision: the switches of torch that
    change its numbers; see precision.flags_for. part, depth: which pass of a cut network, "" for a whole one. patches:
    what other extensions have put on the UNet, and at which points. additions: what our forward computes of what is put
    on the UNet. lossy: with another choice of it, it is another shape.
    """

    architecture: str
    height: int
    width: int
    batch: int
    tokens: int
    dtype: torch.dtype
    latent_dtype: torch.dtype
    device: torch.device
    inputs: tuple[str, ...]
    own_inputs: tuple[tuple[str, Hashable], ...]
    upcast_attention: bool
    backend: str = ""
    precision: Flags = ()
    part: str = ""
    depth: int = 0
    patches: tuple[str, ...] = ()
    additions: tuple[str, ...] = ()
    lossy: Lossy = LOSSLESS
    label: str = ""
    weights: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, architecture: str, dtype: torch.dtype, call: Call, backend: str = "", precision: Flags = (),
        weights: tuple[str, ...] = (), lossy: Lossy = LOSSLESS,
    ) -> ShapeKey:
        """The key of a call; height and width are in latent pixels. dtype is the one computed in. weights: see
        Network.weight_marks."""
        batch = call.latent.shape[0]
        height, width = call.latent.shape[-2:]
        cut = call.cut
        return cls(
            architecture=architecture, height=height, width=width, batch=batch, tokens=call.tokens,
            dtype=dtype, latent_dtype=call.latent.dtype, device=call.latent.device,
            inputs=call.unusual, weights=weights,
            own_inputs=call.own_inputs, label=call.label, upcast_attention=call.upcast_attention,
            lossy=lossy, backend=backend, precision=precision,
            part=cut.name if cut else "", depth=cut.depth if cut else 0,
            patches=() if call.patches is None else call.patches.structure, additions=call.additions,
        )

    @classmethod
    def of_decode(
        cls, architecture: str, latent: Tensor, upcast_attention: bool, backend: str, dtype: torch.dtype,
        precision: Flags, marks: tuple[str, ...],
    ) -> ShapeKey:
        """The key of a VAE's decode of a latent (batch, channels, height, width). dtype is the one computed in. marks:
        what else tells it from other decodes."""
        batch, _, height, width = latent.shape
        return cls(
            architecture=architecture, height=height, width=width, batch=batch, tokens=0,
            dtype=dtype, latent_dtype=latent.dtype, device=latent.device, inputs=(DECODE, *marks),
            own_inputs=(), upcast_attention=upcast_attention, backend=backend, precision=precision,
        )

    @property
    def backend_label(self) -> str:
        """The backend and what it computes lossily, for users: "native, 8-bit"."""
        return ", ".join(filter(None, (self.backend, str(self.lossy))))

    @property
    def is_decode(self) -> bool:
        """Whether this is a decode of the VAE, not a call of the UNet."""
        return DECODE in self.inputs

    @property
    def is_cached_pass(self) -> bool:
        """Whether only the outer stages are computed."""
        return self.part == CACHED

    @cached_property
    def resolution(self) -> str:
        """Pixels, width x height."""
        return f"{self.width * LATENT_PIXEL}x{self.height * LATENT_PIXEL}"

    def __str__(self) -> str:
        tokens = "VAE" if self.is_decode else f"{self.tokens} tokens"
        part = f", {self.part} at depth {self.depth}" if self.part else ""
        patched = f", with {len(self.patches)} functions of other extensions" if self.patches else ""
        marks = () if self.is_decode else (*self.weights, *self.inputs)
        added = "".join(f", {one}" for one in (*marks, *self.additions))
        return f"{self.resolution}, batch {self.batch}, {tokens}{part}{patched}{added}"

"""ShapeKey: two UNet calls, or two decodes, with equal keys can be served by the same graph."""
from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .call import CACHED, Call
from .precision import Flags

# The number of pixels per latent pixel, in width and height.
LATENT_PIXEL = 8
# The first word in the inputs of the key of a VAE's decode.
DECODE = "vae decode"


class Lossy(NamedTuple):
    """The lossy computation that the user allows.

    low_bit: as Settings.low_bit: the products that are computed in eight bits; "" for none.
    only: whether the GPU has the weights of these products in eight bits alone.
    """

    low_bit: str = ""
    only: bool = False

    def __str__(self) -> str:
        """Words for users, shown after the backend's name."""
        if self.only:
            return "8-bit only"
        return "8-bit" if self.low_bit else ""


LOSSLESS = Lossy()


@dataclass(frozen=True)
class ShapeKey:
    """Everything that decides whether a captured or compiled forward can serve a call, besides the weights.

    architecture: see Layout.architecture.
    height, width: in latent pixels.
    batch: rows.
    tokens: the context length; 0 for a decode.
    dtype: the dtype computed in. latent_dtype, device: of the latent.
    inputs: Call.unusual, in words; DECODE comes first for a decode.
    weights: Network.weight_marks, in words.
    own_inputs: shapes of inputs that only this family's calls have; see Call.own_inputs.
    label: see Call.label.
    backend: the name of the backend; a shape that fails on one may be served by another.
    precision: torch's switches that affect the numbers; see precision.flags_for.
    part, depth: the pass of a cut network (FULL or CACHED, and Cut.depth); "" and 0 without a cut.
    patches: Points.structure: the functions of other extensions in this call, and their points.
    additions: see Call.additions.
    lossy: the lossy computation.
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
        """The key of a call. dtype: the dtype computed in. weights: Network.weight_marks."""
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
        """The key of a VAE's decode of a latent (batch, channels, height, width). dtype: the dtype computed in. marks:
        words for everything else that distinguishes decodes."""
        batch, _, height, width = latent.shape
        return cls(
            architecture=architecture, height=height, width=width, batch=batch, tokens=0,
            dtype=dtype, latent_dtype=latent.dtype, device=latent.device, inputs=(DECODE, *marks),
            own_inputs=(), upcast_attention=upcast_attention, backend=backend, precision=precision,
        )

    @property
    def backend_label(self) -> str:
        """The backend and its lossy computation, for users: "native, 8-bit"."""
        return ", ".join(filter(None, (self.backend, str(self.lossy))))

    @property
    def is_decode(self) -> bool:
        """Whether this is a decode of a VAE rather than a call of a UNet."""
        return DECODE in self.inputs

    @property
    def is_cached_pass(self) -> bool:
        """Whether only the outer stages of a cut network are computed."""
        return self.part == CACHED

    @cached_property
    def resolution(self) -> str:
        """Width and height in pixels, as "512x768"."""
        return f"{self.width * LATENT_PIXEL}x{self.height * LATENT_PIXEL}"

    def __str__(self) -> str:
        tokens = "VAE" if self.is_decode else f"{self.tokens} tokens"
        part = f", {self.part} at depth {self.depth}" if self.part else ""
        patched = f", with {len(self.patches)} functions of other extensions" if self.patches else ""
        marks = () if self.is_decode else (*self.weights, *self.inputs)
        added = "".join(f", {one}" for one in (*marks, *self.additions))
        return f"{self.resolution}, batch {self.batch}, {tokens}{part}{patched}{added}"

"""ShapeKey: two calls of a network, or two decodes, with equal keys can be served by the same graph."""
from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .call import CACHED, Call
from .precision import Flags

# The width, and the height, of a latent pixel in pixels of the image.
LATENT_PIXEL = 8
# The first item of ShapeKey.inputs for a VAE's decode.
DECODE = "vae decode"


class Lossy(NamedTuple):
    """Which lossy computation a backend uses for a shape.

    low_bit: the matrix products in eight bits, in words of Settings.low_bit; "" for none.
    only: whether the GPU has the weights of these products in eight bits alone, without the exact ones.
    """

    low_bit: str = ""
    only: bool = False

    def __str__(self) -> str:
        """Words for users, shown after the backend's name: "8-bit only", "8-bit", or "" if nothing is lossy."""
        if self.only:
            return "8-bit only"
        return "8-bit" if self.low_bit else ""


LOSSLESS = Lossy()


@dataclass(frozen=True)
class ShapeKey:
    """Everything that decides whether a captured or compiled forward can serve a call, besides the weights.

    architecture: see Layout.architecture.
    height, width: in latent pixels.
    batch: the number of rows.
    tokens: the length of the prompt (Call.tokens); 0 for a decode.
    dtype: the dtype computed in. latent_dtype, device: of the latent.
    inputs: Call.unusual; of a decode DECODE, then words for everything else that distinguishes decodes.
    weights: Network.weight_marks, words for how the host computes with its weights.
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
        """The key of a call. The other arguments are the fields of their names; `device` is the latent's."""
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
        """The key of a VAE's decode of a latent (batch, channels, height, width). marks: words for everything else that
        distinguishes decodes, which follow DECODE in `inputs`. The other arguments are the fields of their names."""
        batch, _, height, width = latent.shape
        return cls(
            architecture=architecture, height=height, width=width, batch=batch, tokens=0,
            dtype=dtype, latent_dtype=latent.dtype, device=latent.device, inputs=(DECODE, *marks),
            own_inputs=(), upcast_attention=upcast_attention, backend=backend, precision=precision,
        )

    @property
    def backend_label(self) -> str:
        """The backend and its lossy computation, for users: "native, 8-bit", or "native" if nothing is lossy."""
        return ", ".join(filter(None, (self.backend, str(self.lossy))))

    @property
    def is_decode(self) -> bool:
        """Whether this is a VAE's decode rather than a call of a UNet or transformer."""
        return DECODE in self.inputs

    @property
    def is_cached_pass(self) -> bool:
        """Whether this is a cached pass of DeepCache, which computes only a network's outer stages (see Cut)."""
        return self.part == CACHED

    @cached_property
    def resolution(self) -> str:
        """Width and height of the image in pixels, as "512x768"."""
        return f"{self.width * LATENT_PIXEL}x{self.height * LATENT_PIXEL}"

    def __str__(self) -> str:
        """The key in words for the log, without the backend and the dtypes: different keys may read alike."""
        tokens = "VAE" if self.is_decode else f"{self.tokens} tokens"
        part = f", {self.part} at depth {self.depth}" if self.part else ""
        patched = f", with {len(self.patches)} functions of other extensions" if self.patches else ""
        marks = () if self.is_decode else (*self.weights, *self.inputs)
        added = "".join(f", {one}" for one in (*marks, *self.additions))
        return f"{self.resolution}, batch {self.batch}, {tokens}{part}{patched}{added}"

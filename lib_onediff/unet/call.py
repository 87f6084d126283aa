"""What one call of a UNet is, whichever host makes it."""
from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .half import Half


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
class UNetCall:
    """The inputs of one denoising call.

    latent: (batch, channels, height, width), in latent pixels.
    timestep: (batch,), float or integer, in training steps (0 to 1000; may be fractional).
    context: (batch, tokens, width): the text encoder's output.
    y: (batch, width) pooled text and size embedding of SDXL-like models, else None.
    timestep_condition: (batch, width) guidance embedding of LCM-distilled models, else None.
    control: residuals to add, else None.
    upcast_attention: compute attention scores in float32 (SD2.1 overflows in float16).
    half: which half of the UNet is wanted (DeepCache), None for the whole.
    """

    latent: Tensor
    timestep: Tensor
    context: Tensor
    y: Tensor | None = None
    timestep_condition: Tensor | None = None
    control: Control | None = None
    upcast_attention: bool = False
    half: Half | None = None

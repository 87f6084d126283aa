"""What one call of a Stable Diffusion UNet is: its inputs, those of ControlNets and of IP-Adapters among them."""
from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ...core.call import Call
from ...core.fields import LEFT_OUT
from .patch_points import PatchPoints


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

    key_values: (batch, tokens, columns): side by side, for each cross attention that the adapter changes, its keys and
    then its values. The adapter's scale is a factor of the values.
    parts: by the path of a cross attention's query, the first column and the number of columns that are its keys and
    values.
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
class UNetCall(Call):
    """The inputs of one call of a UNet.

    context: (batch, tokens, width): the text encoder's output.
    y: (batch, width) pooled text and size embedding of SDXL-like models, else None.
    timestep_condition: (batch, width) guidance embedding of LCM-distilled models, else None.
    control: residuals to add, else None.
    image_prompts: what IP-Adapters add.
    """

    context: Tensor
    y: Tensor | None = None
    timestep_condition: Tensor | None = None
    control: Control | None = None
    image_prompts: tuple[ImagePrompt, ...] = ()
    patches: PatchPoints | None = field(default=None, kw_only=True, metadata=LEFT_OUT)

    @property
    def prompt(self) -> tuple[Tensor, ...]:
        return (self.context,) if self.y is None else (self.context, self.y)

    @property
    def additions(self) -> tuple[str, ...]:
        return tuple(prompt.structure for prompt in self.image_prompts)

    @property
    def label(self) -> str:
        return "" if self.control is None else "with control"

"""The inputs of one call of a Stable Diffusion UNet, with those of ControlNets and IP-Adapters."""
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
    """Residuals from a ControlNet or T2I adapter, each (batch, channels, height, width); None adds nothing.

    input[i] is added to the output of input stage i, so the next stage and the skip both have it. All residuals of
    middle are added to the output of the middle stage. output[i] is added to the skip that output stage i takes. A
    tuple may have fewer members than the UNet has stages: nothing is added for the stages beyond its end.
    """

    input: tuple[Tensor | None, ...] = ()
    middle: tuple[Tensor | None, ...] = ()
    output: tuple[Tensor | None, ...] = ()


@dataclass(frozen=True)
class ImagePrompt:
    """The image's keys and values of one IP-Adapter (Ye et al. 2023, arXiv 2308.06721). To the output of each cross
    attention that it changes, the adapter adds that of a second attention, from the same queries to the tokens of an
    image.

    key_values: (batch, tokens, columns). For each cross attention that the adapter changes: the keys, then the values,
        already multiplied by the adapter's scale.
    parts: the columns of key_values for each such attention, as (first column, number of columns of keys and values
        together), by the path of the linear layer of its queries.
    structure: words for a shape's key: the number of tokens, and how many attentions are changed, with a digest of
        which. Equal for image prompts that are computed the same way. Derived from key_values and parts.
    """

    key_values: Tensor
    parts: Mapping[str, tuple[int, int]] = field(metadata=LEFT_OUT)
    structure: str = field(init=False)

    def __post_init__(self) -> None:
        """Set structure. A digest of the paths in `parts` keeps it short."""
        which = hashlib.sha256("\n".join(sorted(self.parts)).encode()).hexdigest()[:8]
        tokens = self.key_values.shape[1] if self.key_values.dim() > 1 else 0
        structure = f"an image prompt of {tokens} tokens in {len(self.parts)} attentions ({which})"
        object.__setattr__(self, "structure", structure)

    def key_value(self, query_path: str) -> tuple[Tensor, Tensor] | None:
        """The image's keys and values for a cross attention, (batch, tokens, width) each, as views; None if the adapter
        does not change that attention. query_path: the path of the linear layer of its queries."""
        part = self.parts.get(query_path)
        if part is None:
            return None
        key, value = self.key_values.narrow(-1, *part).chunk(2, dim=-1)
        return key, value


@dataclass(frozen=True)
class UNetCall(Call):
    """A call of a UNet. latent, timestep and the other common fields are Call's.

    context: (batch, tokens, width), the text encoder's output.
    y: (batch, width), SDXL's embedding of pooled text and sizes; None for other models.
    timestep_condition: (batch, width), the guidance embedding of LCM-distilled models; None for others.
    control: residuals of ControlNets; None without any.
    image_prompts: one for each IP-Adapter.
    patches: functions of other extensions; None without any.
    """

    context: Tensor
    y: Tensor | None = None
    timestep_condition: Tensor | None = None
    control: Control | None = None
    image_prompts: tuple[ImagePrompt, ...] = ()
    patches: PatchPoints | None = field(default=None, kw_only=True, metadata=LEFT_OUT)

    @property
    def prompt(self) -> tuple[Tensor, ...]:
        """The tensors by which the prompts of two calls differ: the context, and y if there is one."""
        return (self.context,) if self.y is None else (self.context, self.y)

    @property
    def additions(self) -> tuple[str, ...]:
        """Words for a shape's key, one for each IP-Adapter of the call; empty without any."""
        return tuple(prompt.structure for prompt in self.image_prompts)

    @property
    def label(self) -> str:
        """Words for users by which this call differs from usual ones of its size: "with control" if it has residuals of
        ControlNets, otherwise "". IP-Adapters and patches have no words here."""
        return "" if self.control is None else "with control"

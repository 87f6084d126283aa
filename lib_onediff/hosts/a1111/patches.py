"""What extensions put on the modules of A1111's UNets, as the points of our forward.

There is no protocol: an extension sets a forward on the instance of an attention (IP-Adapter in sd-webui-controlnet,
HyperTile, regional prompts) or of a transformer block (ControlNet's reference), gives the block another class (token
merging), or replaces what concatenates hidden states and skips (FreeU). Each is called as it stands, with what the
host's own module hands it.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...model.layout import TransformerBlock
from ...model.patch_points import CROSS_ATTENTION, Block, PatchPoints
from ..author import author
from ..changed_modules import SELF_NORM, Changed, ChangedModules, functions_of, is_block_or_attention, kinds_of
from .concatenation import Concatenation
from .inert import does_nothing_now, foreign_forward

# What the class of a stage is called.
STAGE = "TimestepEmbedSequential"


class ModulePatches(PatchPoints):
    """The changed modules of a UNet, as they are at one call. concatenation: what stands for torch.cat, where that is
    not the host's own."""

    def __init__(self, changed: Changed, concatenation: Concatenation | None = None) -> None:
        self.changed, self._concatenation = changed, concatenation
        self._here: dict[str, Any] = {}
        self.places = ({path: tuple(names) for path, names in changed.items()}, concatenation is not None)
        self.structure = kinds_of(changed)
        self._functions = functions_of(changed)
        if concatenation is not None:
            self.structure += (f"skips by {author(concatenation)}",)
            self._functions.append(concatenation)

    def functions(self) -> list[Any]:
        return self._functions

    def stands(self, point: str, *arguments: Any) -> bool:
        if point == "concatenate":
            return self._concatenation is not None
        return point == "whole_block" and "" in self._here or point == "whole_attention" and arguments[0] in self._here

    def concatenate(self, index: int, hidden_states: Tensor, skip: Tensor) -> Tensor | None:
        if self._concatenation is None:
            return None
        joined = self._concatenation([hidden_states.contiguous(), skip.contiguous()], dim=1)
        return joined.to(hidden_states.dtype).detach()

    def begin_block(self, place: Block, block: TransformerBlock) -> bool:
        self._here = self.changed.get(block.self_norm.path.removesuffix(SELF_NORM), {})
        return bool(self._here)

    def whole_block(self, block: TransformerBlock, tokens: Tensor, context: Tensor) -> Tensor | None:
        module = self._here.get("")
        return None if module is None else module(tokens.contiguous(), context=context).to(tokens.dtype)

    def whole_attention(
        self, attention: str, block: TransformerBlock, normed: Tensor, context: Tensor
    ) -> Tensor | None:
        module = self._here.get(attention)
        if module is None:
            return None
        given = context if attention == CROSS_ATTENTION else None
        added: Tensor = module(normed.contiguous(), context=given).to(normed.dtype)
        return added


class ForeignModules(ChangedModules[ModulePatches]):
    """concatenation: tells what stands for torch.cat in the forwards of UNets, where that is not the host's own."""

    def __init__(self, concatenation: Callable[[], Concatenation | None] = lambda: None) -> None:
        super().__init__(ModulePatches, does_nothing_now)
        self._concatenation = concatenation

    def at_call(self, unet: nn.Module) -> ModulePatches | None:
        """What stands on its modules and between them now, or None."""
        within, concatenation = self.in_stages(unet), self._concatenation()
        if concatenation is None:
            return within
        return ModulePatches({} if within is None else within.changed, concatenation)

    def in_stages(self, unet: nn.Module) -> ModulePatches | None:
        """What stands on its modules alone, or None."""
        return super().at_call(unet)


def is_brought(unet: nn.Module, module: nn.Module) -> bool:
    """Whether calls bring what is set on a module's instance as patches. A stage's own runs around our hook where an
    extension walks through the stages: ControlNet's reference records norms there."""
    if is_block_or_attention(module):
        return True
    return type(module).__name__ == STAGE and foreign_forward(unet) is not None

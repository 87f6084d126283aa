"""What extensions put on the modules of A1111's UNets, as the points of our forward.

There is no protocol: an extension sets a forward on the instance of an attention (IP-Adapter in sd-webui-controlnet,
HyperTile, regional prompts) or gives a transformer block another class (token merging). Each is called as it stands,
with what the host's own block hands it.
"""
from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...model.layout import TransformerBlock
from ...model.patch_points import CROSS_ATTENTION, Block, PatchPoints
from ...model.read_ldm import is_block
from ..changed_modules import SELF_NORM, Changed, ChangedModules, functions_of, is_block_or_attention, kinds_of
from .inert import REFERENCE_HACKS, does_nothing_now


class ModulePatches(PatchPoints):
    """The changed modules of a UNet, as they are at one call."""

    def __init__(self, changed: Changed) -> None:
        self._changed = changed
        self._here: dict[str, Any] = {}
        self.places = {path: tuple(names) for path, names in changed.items()}
        self.structure = kinds_of(changed)
        self._functions = functions_of(changed)

    def functions(self) -> list[Any]:
        return self._functions

    def stands(self, point: str, *arguments: Any) -> bool:
        return point == "whole_block" and "" in self._here or point == "whole_attention" and arguments[0] in self._here

    def begin_block(self, place: Block, block: TransformerBlock) -> bool:
        self._here = self._changed.get(block.self_norm.path.removesuffix(SELF_NORM), {})
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
    def __init__(self) -> None:
        super().__init__(ModulePatches, does_nothing_now)


def is_brought(unet: nn.Module, module: nn.Module) -> bool:
    """Whether calls bring what is set on a module's instance as patches. What ControlNet's reference sets keeps what
    it has recorded from one pass for the next: that is the host's."""
    if is_block(type(module)):
        return getattr(module.__dict__.get("_forward"), "__name__", "") not in REFERENCE_HACKS
    return is_block_or_attention(module)

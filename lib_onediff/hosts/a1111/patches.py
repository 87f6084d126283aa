"""What extensions put on the modules of A1111's UNets, as the points of our forward.

There is no protocol: an extension sets a forward on the instance of an attention (IP-Adapter in sd-webui-controlnet,
HyperTile, regional prompts) or of a transformer block (ControlNet's reference), gives the block another class (token
merging), or replaces what concatenates hidden states and skips (FreeU). Each is called as it stands, with what the
host's own module hands it.
"""
from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...model.layout import TransformerBlock
from ...model.patch_points import CROSS_ATTENTION, SELF_ATTENTION, Block, PatchPoints
from ...model.patches import own_method
from ...model.read_ldm import is_block, is_derived_block
from ...runtime.runtime import runtime
from .author import author
from .concatenation import Concatenation
from .inert import does_nothing_now, foreign_forward

METHODS = ("forward", "_forward")
# What an attention has, and what the class of a stage is called.
PROJECTIONS = ("to_q", "to_k", "to_v", "to_out")
STAGE = "TimestepEmbedSequential"
ATTENTIONS = (SELF_ATTENTION, CROSS_ATTENTION)
# The last part of the path of a block's first norm, below its block.
SELF_NORM = ".norm1"


class ModulePatches(PatchPoints):
    """The changed modules of a UNet, as they are at one call. changed: by the paths of their blocks, the name that each
    has there ("" for the block itself). concatenation: what stands for torch.cat, where that is not the host's own."""

    def __init__(self, changed: dict[str, dict[str, Any]], concatenation: Concatenation | None = None) -> None:
        self.changed, self._concatenation = changed, concatenation
        self._here: dict[str, Any] = {}
        found = [
            (name or "block", foreign_function(module)) for names in changed.values() for name, module in names.items()
        ]
        self.places = ({path: tuple(names) for path, names in changed.items()}, concatenation is not None)
        kinds = Counter(f"{name} by {author(function)}" for name, function in found)
        structure = sorted(f"{kind} in {count} blocks" for kind, count in kinds.items())
        self._functions = [function for _, function in found]
        if concatenation is not None:
            structure.append(f"skips by {author(concatenation)}")
            self._functions.append(concatenation)
        self.structure = tuple(structure)

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


class Places(NamedTuple):
    """The transformer blocks and attentions of a UNet: path of the block, name within it, and module of each."""

    names: list[tuple[str, str]]
    modules: list[weakref.ref[Any]]

    @classmethod
    def of(cls, unet: nn.Module) -> Places:
        blocks = [(path, module) for path, module in unet.named_modules() if is_block(type(module))]
        found = [
            ((path, name), part) for path, block in blocks
            for name, part in (("", block), *((name, getattr(block, name)) for name in ATTENTIONS)) if part is not None
        ]
        return cls([name for name, _ in found], [weakref.ref(part) for _, part in found])

    def present(self) -> list[Any] | None:
        """The modules; None where one is gone."""
        modules = [reference() for reference in self.modules]
        return None if None in modules else modules


class ForeignModules:
    """Finds what stands on the modules of UNets: asked at every call, 0.04 ms for SDXL where there is nothing.

    concatenation: tells what stands for torch.cat in their forwards, where that is not the host's own.
    """

    def __init__(self, concatenation: Callable[[], Concatenation | None] = lambda: None) -> None:
        self._concatenation = concatenation
        self._places: weakref.WeakKeyDictionary[nn.Module, Places] = weakref.WeakKeyDictionary()
        self._last: weakref.WeakKeyDictionary[nn.Module, tuple[str, ...]] = weakref.WeakKeyDictionary()

    def forget(self, unet: nn.Module) -> None:
        """A sampling begins: somebody may have put other modules into the UNet."""
        self._places.pop(unet, None)

    def at_call(self, unet: nn.Module) -> ModulePatches | None:
        """What stands on its modules and between them now, or None."""
        within, concatenation = self.in_stages(unet), self._concatenation()
        if concatenation is None:
            return within
        return ModulePatches({} if within is None else within.changed, concatenation)

    def in_stages(self, unet: nn.Module) -> ModulePatches | None:
        """What stands on its modules now, or None. Where that is something else than at the last call, the UNet is
        looked at again, as when a sampling begins."""
        patches = self._find(unet)
        structure = () if patches is None else patches.structure
        before, self._last[unet] = self._last.get(unet, ()), structure
        if structure != before and (managed := runtime.managed_unet(unet)) is not None:
            managed.bound.begin_sampling()
        return patches

    def _find(self, unet: nn.Module) -> ModulePatches | None:
        places = self._places.get(unet)
        modules = None if places is None else places.present()
        if places is None or modules is None:
            places = self._places[unet] = Places.of(unet)
            modules = [reference() for reference in places.modules]
        derived = set(filter(is_derived_block, set(map(type, modules))))
        changed: dict[str, dict[str, Any]] = {}
        for index, module in enumerate(modules):
            state = module.__dict__
            if ("forward" in state or "_forward" in state or type(module) in derived) and is_foreign(unet, module):
                path, name = places.names[index]
                changed.setdefault(path, {})[name] = module
        return ModulePatches(changed) if changed else None


def foreign_function(module: Any) -> Any:
    """What runs in the place of a module's own code."""
    for method in METHODS:
        own = own_method(module, method)
        if own is not None:
            return own
    return type(module)._forward


def is_foreign(unet: nn.Module, module: Any) -> bool:
    if all(own_method(module, method) is None for method in METHODS):
        return is_derived_block(module.__class__)
    return not does_nothing_now(unet, module)


def is_brought(unet: nn.Module, module: nn.Module) -> bool:
    """Whether calls bring what is set on a module's instance as patches. A stage's own runs around our hook where an
    extension walks through the stages: ControlNet's reference records norms there."""
    if is_block(type(module)) or all(hasattr(module, name) for name in PROJECTIONS):
        return True
    return type(module).__name__ == STAGE and foreign_forward(unet) is not None

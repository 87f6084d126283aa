"""Finds the transformer blocks and attentions of a host's UNet that extensions have changed: by a forward set on the
instance (regional prompts, HyperTile, IP-Adapter on A1111) or on one of its projections (ControlLLLite on A1111), or by
another class (token merging)."""
from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torch import nn

from ..core.origins import author, origin, package
from ..families.unet.patch_points import CROSS_ATTENTION, SELF_ATTENTION
from ..families.unet.read import is_block, is_derived_block
from ..weights.scan import own_method

# The methods that extensions set on a module's instance.
METHODS = ("forward", "_forward")
ATTENTIONS = (SELF_ATTENTION, CROSS_ATTENTION)
PROJECTIONS = ("to_q", "to_k", "to_v", "to_out")
# The path of a block's first norm, relative to the block.
SELF_NORM = ".norm1"
# The package of every WebUI's own code.
WEBUIS = "modules"
# The blocks and attentions that extensions have changed, by the path of their block, then by their name in it ("" for
# the block itself).
Changed = dict[str, dict[str, Any]]


class BlockModule(NamedTuple):
    """A module of a UNet that extensions may change: a transformer block, one of its attentions, or a projection of an
    attention.

    block: the path of the block.
    name: the attention's name in the block; "" for the block itself.
    called: a weak reference to the block or attention, which our forward calls as a whole if `module` is changed.
    module: a weak reference to the module itself: the same as `called`, or a projection of it.
    """

    block: str
    name: str
    called: Callable[[], Any]
    module: Callable[[], Any]


def block_modules_of(unet: nn.Module) -> list[BlockModule]:
    """All modules of a UNet that extensions may change, as BlockModules: its transformer blocks, their attentions, and
    the attentions' projections."""
    blocks = [(path, module) for path, module in unet.named_modules() if is_block(type(module))]
    return [
        BlockModule(path, name, weakref.ref(called), weakref.ref(module)) for path, block in blocks
        for name, called in (("", block), *((name, getattr(block, name)) for name in ATTENTIONS)) if called is not None
        for module in with_projections(called)
    ]


def with_projections(module: Any) -> list[Any]:
    """A block or attention, followed by those of its direct children that are named in PROJECTIONS."""
    return list(filter(None, (module, *(getattr(module, name, None) for name in PROJECTIONS))))


class ChangedModules:
    """Finds the modules of UNets that extensions have changed. Each call of a UNet searches anew (at_call), which takes
    0.15 ms for SDXL if nothing is changed."""

    def __init__(self, inert: Callable[[nn.Module, Any], bool] = lambda unet, module: False) -> None:
        """inert: inert(unet, module) returns whether the forward set on a module's instance now computes the same as
        the module's class (HostTraits.inert); such a module does not count as changed. By default, every one counts."""
        self._inert = inert
        self._watched: weakref.WeakKeyDictionary[nn.Module, list[BlockModule]] = weakref.WeakKeyDictionary()

    def look_again(self, unet: nn.Module) -> None:
        """Forget the UNet's list of blocks and attentions, so that the next call makes it anew. Called before each
        sampling, because an extension may have replaced modules."""
        self._watched.pop(unet, None)

    def at_call(self, unet: nn.Module) -> Changed:
        """The blocks and attentions of a UNet that are changed now; {} if none is. If only a projection is changed, its
        attention counts as changed."""
        watched = self._watched.get(unet, [])
        modules = [one.module() for one in watched]
        if unet not in self._watched or None in modules:
            watched = self._watched[unet] = block_modules_of(unet)
            modules = [one.module() for one in watched]
        derived = set(filter(is_derived_block, set(map(type, modules))))
        changed: Changed = {}
        for one, module in zip(watched, modules, strict=True):
            state = module.__dict__
            touched = "forward" in state or "_forward" in state or type(module) in derived
            if touched and self._is_foreign(unet, module):
                changed.setdefault(one.block, {})[one.name] = one.called()
        return changed

    def _is_foreign(self, unet: nn.Module, module: Any) -> bool:
        """Whether a module now runs code of an extension. Only called for a module that has a forward on its instance,
        or is a block of an extension's class (is_derived_block)."""
        if all(own_method(module, method) is None for method in METHODS):
            return is_derived_block(module.__class__)
        return not self._inert(unet, module)


def words_for(changed: Changed) -> tuple[str, ...]:
    """The changes in words such as "attn1 by IP-Adapter in 16 blocks", sorted; equal changes are counted together. For
    users, and for Points.structure."""
    found = [(name or "block", module) for names in changed.values() for name, module in names.items()]
    kinds = Counter(f"{name} by {author(foreign_functions(module)[0])}" for name, module in found)
    return tuple(sorted(f"{kind} in {count} blocks" for kind, count in kinds.items()))


def functions_of(changed: Changed) -> list[Any]:
    """The extensions' functions in all changed modules, as foreign_functions finds them."""
    modules = (module for names in changed.values() for module in names.values())
    return [function for module in modules for function in foreign_functions(module)]


def foreign_functions(module: Any) -> list[Any]:
    """The extensions' functions that run in place of the code of a changed module and its projections, at least one:
    those set on the instances; if none is set there, the _forward of the module's class, which is an extension's."""
    own = [own_method(part, method) for part in with_projections(module) for method in METHODS]
    return list(filter(None, own)) or [type(module)._forward]


def foreign_forward(unet: nn.Module) -> str | None:
    """The author of the forward that an extension has set on this UNet's instance, in words for users; None if there is
    none, or if it is the class's own forward."""
    forward = unet.__dict__.get("forward")
    if forward is None or getattr(forward, "__func__", None) is type(unet).forward:
        return None
    return author(forward)


def forward_above(unet: nn.Module, ours: Collection[Any]) -> str | None:
    """The author of the function that runs in place of our hook when this UNet is called, in words for users: one on
    the instance, or one set on the class after our hook. None if our hook runs. ours: the functions of our hooks."""
    owner = foreign_forward(unet)
    of_class = type(unet).forward
    return author(of_class) if owner is None and of_class not in ours else owner


def replaced_method(holder: Any, method: str) -> str | None:
    """The author of the function that an extension has put in place of a method of one of the WebUI's objects (holder),
    on the object or in its class, in words for users. None if the method is the WebUI's own or OneDiff's, or does not
    exist."""
    function = vars(holder).get(method) or getattr(type(holder), method, None)
    own = (package(type(holder).__module__), WEBUIS, package(__name__))
    return None if function is None or package(origin(function)) in own else author(function)


def is_brought(unet: nn.Module, path: str) -> bool:
    """Whether ChangedModules finds a forward that is set on the module at this path, so that the adapter passes it with
    each call: the module is a transformer block, an attention, or an attention's projection. See HostTraits.brought."""
    module = unet.get_submodule(path)
    above, _, name = path.rpartition(".")
    of_attention = name in PROJECTIONS and is_attention(unet.get_submodule(above))
    return of_attention or is_block(type(module)) or is_attention(module)


def is_attention(module: nn.Module) -> bool:
    """Whether a module is an attention, which is recognised by its projections."""
    return all(hasattr(module, name) for name in PROJECTIONS)

"""Changes that extensions make to the modules of A1111's UNets, as the patch points of our forward.

A1111 has no interface for them. An extension sets a forward on the instance of an attention (IP-Adapter in
sd-webui-controlnet, HyperTile, regional prompts) or of a transformer block (ControlNet's reference mode), gives the
block another class (token merging), or replaces the concatenation of hidden states and skips (FreeU). Our forward calls
the changed module, or function, with the arguments that the host's own module would pass.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...core.origins import author, origin
from ...families.unet.layout import TransformerBlock
from ...families.unet.patch_points import CROSS_ATTENTION, BlockPlace, PatchPoints
from ..changed_modules import METHODS, SELF_NORM, Changed, functions_of, words_for

# Python modules with the WebUI's own patches of classes: lazy LoRA (merged before a call), attention and norm variants
# that compute the same, gradient checkpoints (not used here). They also contain hypernetworks and the manual cast of
# modules.devices, which A1111._check_state and layers.check_layers refuse.
TRUSTED = (
    "networks", "modules.devices", "modules.sd_hijack_optimizations", "modules.hypernetworks.hypernetwork",
    "modules.sd_hijack_utils", "modules.sd_hijack_checkpoint", "modules.sd_hijack_unet", "modules.sd_unet",
)
Concatenation = Callable[..., Tensor]
# The function with which sd-webui-freeu replaces torch.cat until the WebUI ends.
FREEU = "free_u_cat_hijack"
# The forwards of sd-webui-controlnet's reference mode, which shares attention between two passes through the UNet.
REFERENCE_HACKS = ("hacked_basic_transformer_inner_forward", "hacked_group_norm_forward")


class ModulePatches(PatchPoints):
    """The changed modules of a UNet at one call, as the PatchPoints of our forward.

    changed: from ChangedModules.at_call. concatenation: an extension's replacement of torch.cat; None if the host's own
    is in use.
    """

    def __init__(self, changed: Changed, concatenation: Concatenation | None = None) -> None:
        self._changed = changed
        self._concatenation = concatenation
        self._here: dict[str, Any] = {}
        self.positions = ({path: tuple(names) for path, names in changed.items()}, concatenation is not None)
        self.structure = words_for(changed)
        self.functions = functions_of(changed)
        if concatenation is not None:
            self.structure += (f"skips by {author(concatenation)}",)
            self.functions = [*self.functions, concatenation]

    def has_function(self, point: str, *arguments: Any) -> bool:
        """Whether our forward will call an extension's function at this point: torch.cat's replacement, or a changed
        module of the present block (see begin_block). point, arguments: the method's name, and its arguments."""
        if point == "concatenate":
            return self._concatenation is not None
        return point == "whole_block" and "" in self._here or point == "whole_attention" and arguments[0] in self._here

    def concatenate(self, index: int, hidden_states: Tensor, skip: Tensor) -> Tensor | None:
        """Hidden states and skip, (batch, channels, height, width), concatenated by the extension's replacement of
        torch.cat, in the hidden states' dtype. None without such a replacement: our forward then concatenates them.
        index: not used."""
        if self._concatenation is None:
            return None
        joined = self._concatenation([hidden_states.contiguous(), skip.contiguous()], dim=1)
        return joined.to(hidden_states.dtype).detach()

    def begin_block(self, place: BlockPlace, block: TransformerBlock) -> bool:
        """Called at the beginning of each transformer block: keeps the block's changed modules for whole_block and
        whole_attention. Returns whether there are any; if not, the forward calls neither method for this block."""
        self._here = self._changed.get(block.self_norm.path.removesuffix(SELF_NORM), {})
        return bool(self._here)

    def whole_block(self, block: TransformerBlock, tokens: Tensor, context: Tensor) -> Tensor | None:
        """The output of the present block for these tokens, (batch, tokens, width), computed by the extension's block;
        None if the block itself is not changed."""
        module = self._here.get("")
        return None if module is None else module(tokens.contiguous(), context=context).to(tokens.dtype)

    def whole_attention(
        self, attention: str, block: TransformerBlock, normed: Tensor, context: Tensor
    ) -> Tensor | None:
        """The output of an attention of the present block, (batch, tokens, width), computed by the extension's
        attention; None if this attention is not changed. attention: SELF_ATTENTION or CROSS_ATTENTION. normed: the
        attention's input."""
        module = self._here.get(attention)
        if module is None:
            return None
        given = context if attention == CROSS_ATTENTION else None
        added: Tensor = module(normed.contiguous(), context=given).to(normed.dtype)
        return added


def patches_of(changed: Changed, concatenation: Concatenation | None = None) -> ModulePatches | None:
    """The ModulePatches of a call with these changed modules and this concatenation. None if nothing is changed and the
    concatenation is None."""
    return ModulePatches(changed, concatenation) if changed or concatenation is not None else None


def replaced_concatenation() -> Concatenation | None:
    """An extension's replacement of torch.cat in the Python modules of A1111's UNets. None if there is none, or if it
    has no effect now. Takes microseconds."""
    from modules import sd_hijack_unet

    present: Concatenation = sd_hijack_unet.th.cat
    return None if is_the_hosts(present, vars(sd_hijack_unet)) else present


def is_the_hosts(function: Any, own_globals: dict[str, Any]) -> bool:
    """Whether a function is the host's own: a bound method defined in the Python module with these globals. FreeU's
    wrapper of such a method counts as the host's own while FreeU is switched off: it then only calls that method."""
    if getattr(getattr(function, "__func__", None), "__globals__", None) is own_globals:
        return True
    if not isinstance(function, functools.partial) or getattr(function.func, "__name__", "") != FREEU:
        return False
    state = getattr(function.func.__globals__.get("global_state"), "instance", None)
    below = function.keywords.get("original_function")
    return not getattr(state, "enable", True) and is_the_hosts(below, own_globals)


def does_nothing_now(unet: nn.Module, module: nn.Module) -> bool:
    """Whether the forward set on a module's instance now computes the same as the module's class; see HostTraits.inert.
    True if no forward is set. unet: not used.

    HyperTile and ControlNet leave their forwards on modules after use, switched off. An IP-Adapter leaves one of the
    WebUI's own attention functions: the one that was chosen when the adapter was added (Settings, Optimizations).
    """
    state = module.__dict__
    tiles = state.get("__webui_hypertile_params")
    if tiles is not None and "_forward" not in state:
        below = getattr(state["forward"], "__wrapped__", None)
        return not tiles.enabled and below == tiles.forward
    left = [state[name] for name in METHODS if name in state and not is_the_webuis(module, state[name])]
    banks = (getattr(module, name, None) for name in ("bank", "mean_bank", "var_bank"))
    return not left or all(getattr(hack, "__name__", "") in REFERENCE_HACKS for hack in left) and not any(banks)


def is_the_webuis(module: nn.Module, method: Any) -> bool:
    """Whether a method set on a module's instance is the WebUI's own: bound to this module, and defined in its class's
    Python module or in a TRUSTED one."""
    return getattr(method, "__self__", None) is module and origin(method) in (*TRUSTED, type(module).__module__)

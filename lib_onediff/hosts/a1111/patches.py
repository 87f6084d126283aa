"""What extensions put on the modules of A1111's UNets, as the points of our forward.

There is no protocol: an extension sets a forward on the instance of an attention (IP-Adapter in sd-webui-controlnet,
HyperTile, regional prompts) or of a transformer block (ControlNet's reference), gives the block another class (token
merging), or replaces what concatenates hidden states and skips (FreeU). Each is called as it stands, with what the
host's own module hands it.
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

# The WebUI's own patches of layer classes: lazy LoRA (synced before a call), attention and norm variants that
# compute the same, gradient checkpoints (not used here). Hypernetworks live among them and are asked for by name, and
# so is the manual cast of modules.devices.
TRUSTED = (
    "networks", "modules.devices", "modules.sd_hijack_optimizations", "modules.hypernetworks.hypernetwork",
    "modules.sd_hijack_utils", "modules.sd_hijack_checkpoint", "modules.sd_hijack_unet", "modules.sd_unet",
)
Concatenation = Callable[..., Tensor]
# What sd-webui-freeu leaves there as long as the WebUI runs.
FREEU = "free_u_cat_hijack"
# What sd-webui-controlnet's reference sets; it shares attention between two passes through the UNet.
REFERENCE_HACKS = ("hacked_basic_transformer_inner_forward", "hacked_group_norm_forward")


class ModulePatches(PatchPoints):
    """The changed modules of a UNet, as they are at one call. concatenation: what stands for torch.cat, where that is
    not the host's own."""

    def __init__(self, changed: Changed, concatenation: Concatenation | None = None) -> None:
        self._changed, self._concatenation = changed, concatenation
        self._here: dict[str, Any] = {}
        self.positions = ({path: tuple(names) for path, names in changed.items()}, concatenation is not None)
        self.structure = words_for(changed)
        self.functions = functions_of(changed)
        if concatenation is not None:
            self.structure += (f"skips by {author(concatenation)}",)
            self.functions = [*self.functions, concatenation]

    def has_function(self, point: str, *arguments: Any) -> bool:
        if point == "concatenate":
            return self._concatenation is not None
        return point == "whole_block" and "" in self._here or point == "whole_attention" and arguments[0] in self._here

    def concatenate(self, index: int, hidden_states: Tensor, skip: Tensor) -> Tensor | None:
        if self._concatenation is None:
            return None
        joined = self._concatenation([hidden_states.contiguous(), skip.contiguous()], dim=1)
        return joined.to(hidden_states.dtype).detach()

    def begin_block(self, place: BlockPlace, block: TransformerBlock) -> bool:
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


def patches_of(changed: Changed, concatenation: Concatenation | None = None) -> ModulePatches | None:
    """As the patches of a call; None where there are none."""
    return ModulePatches(changed, concatenation) if changed or concatenation is not None else None


def replaced_concatenation() -> Concatenation | None:
    """What stands for torch.cat in the modules of A1111's UNets; None where that is the WebUI's own, or does now just
    what the WebUI's own does. Microseconds."""
    from modules import sd_hijack_unet

    standing: Concatenation = sd_hijack_unet.th.cat
    return None if is_the_hosts(standing, vars(sd_hijack_unet)) else standing


def is_the_hosts(standing: Any, own_globals: dict[str, Any]) -> bool:
    """Whether a function is one of the module with these globals, below FreeU's while that is switched off."""
    if getattr(getattr(standing, "__func__", None), "__globals__", None) is own_globals:
        return True
    if not isinstance(standing, functools.partial) or getattr(standing.func, "__name__", "") != FREEU:
        return False
    state = getattr(standing.func.__globals__.get("global_state"), "instance", None)
    below = standing.keywords.get("original_function")
    return not getattr(state, "enable", True) and is_the_hosts(below, own_globals)


def does_nothing_now(unet: nn.Module, module: nn.Module) -> bool:
    """Whether what HyperTile or ControlNet left on a module is switched off, or the WebUI's own: neither takes it away
    after use, and an IP-Adapter leaves the attention that was chosen when it came (Settings, Optimizations)."""
    state = module.__dict__
    tiles = state.get("__webui_hypertile_params")
    if tiles is not None and "_forward" not in state:
        below = getattr(state["forward"], "__wrapped__", None)
        return not tiles.enabled and below == tiles.forward
    left = [state[name] for name in METHODS if name in state and not is_the_webuis(module, state[name])]
    banks = (getattr(module, name, None) for name in ("bank", "mean_bank", "var_bank"))
    return not left or all(getattr(hack, "__name__", "") in REFERENCE_HACKS for hack in left) and not any(banks)


def is_the_webuis(module: nn.Module, method: Any) -> bool:
    """Whether what is set on a module is one that the WebUI has, or had, on its class."""
    return getattr(method, "__self__", None) is module and origin(method) in (*TRUSTED, type(module).__module__)

"""What extensions leave on the modules of A1111's UNets after use, and whether it does anything now."""
from __future__ import annotations

from torch import nn

from ..author import author

# What sd-webui-controlnet's reference sets; it shares attention between two passes through the UNet.
REFERENCE_HACKS = ("hacked_basic_transformer_inner_forward", "hacked_group_norm_forward")


def does_nothing_now(unet: nn.Module, module: nn.Module) -> bool:
    """Whether what HyperTile or ControlNet left on a module is switched off: neither takes it away after use."""
    state = module.__dict__
    tiles = state.get("__webui_hypertile_params")
    if tiles is not None and "_forward" not in state:
        below = getattr(state["forward"], "__wrapped__", None)
        return not tiles.enabled and below == tiles.forward
    if foreign_forward(unet) is not None:
        # ControlNet at work: what is empty now may be about to record.
        return False
    left = [state[name] for name in ("forward", "_forward") if name in state]
    banks = (getattr(module, name, None) for name in ("bank", "mean_bank", "var_bank"))
    return all(getattr(hack, "__name__", "") in REFERENCE_HACKS for hack in left) and not any(banks)


def foreign_forward(unet: nn.Module) -> str | None:
    """Whose forward is set on this UNet's instance, above its class's own; None where none is."""
    forward = unet.__dict__.get("forward")
    if forward is None or getattr(forward, "__func__", None) is type(unet).forward:
        return None
    return author(forward)

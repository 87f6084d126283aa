"""One call of the host's UNet: put it into a UNetCall, or say what in it only the host's own forward understands."""
from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from ...model.call import Control, UNetCall
from ...model.patches import origin
from .additions import Additions
from .patches import OptionPatches, OwnForwards, points_of

# What the UNet itself writes there while it runs, and what is for ControlNets alone.
HARMLESS_OPTIONS = frozenset({
    "original_shape", "transformer_index", "block", "block_index", "controlnet_conditioning_modifiers",
    "controlnet_model_function_wrapper",
})


def unet_call(
    unet: nn.Module, x: Tensor, timesteps: Tensor, context: Tensor, y: Tensor | None, control: Mapping[str, Any] | None,
    transformer_options: dict[str, Any], upcast_attention: bool, names_read: Collection[str],
    others: Mapping[str, Any], additions: Additions = Additions(),  # noqa: B008
    own: OwnForwards | None = None,
) -> UNetCall | str:
    """The call as ours, or what in it a UNetCall cannot say, in one line for the user. The arguments are those of the
    host's forward, others what it takes besides by name.

    names_read: every name by which the host's UNet may ask for an option or another argument. additions: what our
    forward computes in the place of functions. own: the forwards that stand on the UNet's modules.
    """
    points = points_of(transformer_options, names_read)
    unknown_parts = {name: value for name, value in transformer_options.items() if name not in points}
    patched = unknown_options(unknown_parts, names_read)
    if patched:
        return f"another extension changes the UNet for this call: {', '.join(patched)}"
    unknown = sorted(name for name, value in others.items() if value is not None and name in names_read)
    if unknown:
        return f"the UNet is called with more than we know ({', '.join(unknown)})"
    residuals = control_of(control)
    if isinstance(residuals, str):
        return residuals
    patches: OptionPatches | None = None
    if own is not None or not all(is_empty(transformer_options.get(name)) for name in points):
        own = own or OwnForwards()
        patches = OptionPatches(unet, transformer_options, names_read, additions.stand_for, own)
    return UNetCall(
        latent=x, timestep=timesteps, context=context, y=y, control=residuals, upcast_attention=upcast_attention,
        patches=patches if patches is not None and patches.structure else None, image_prompts=additions.image_prompts,
        freeu=additions.freeu, perturbed=additions.perturbed, shrink=additions.shrink,
    )


def unknown_options(options: Mapping[str, Any], names_read: Collection[str]) -> list[str]:
    """What an extension has put into transformer_options that may change what the UNet computes, each by its name.

    Such as "patches[output_block_patch] by forge_freeu.py". Empty entries change nothing, and neither does plain data
    (a tensor, a number) under a name that the host's UNet never asks for: hosts add such names with every release.
    """
    found: list[str] = []
    for name, value in options.items():
        if name not in HARMLESS_OPTIONS and not is_empty(value) and (name in names_read or not is_plain(value)):
            parts = value if isinstance(value, Mapping) else {"": value}
            found += [describe(name, part, inside) for part, inside in parts.items() if not is_empty(inside)]
    return found


def is_empty(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(is_empty(inside) for inside in value.values())
    return value is None or (isinstance(value, (list, tuple, set, frozenset, str)) and len(value) == 0)


def is_plain(value: Any) -> bool:
    """Whether there is nothing in a value that could be called."""
    if isinstance(value, Mapping):
        return all(is_plain(inside) for inside in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(is_plain(inside) for inside in value)
    return not callable(value)


def describe(name: str, part: Any, value: Any) -> str:
    label = f"{name}[{part}]" if part != "" else name
    while isinstance(value, (Mapping, list, tuple)) and value:
        value = next(iter(value.values() if isinstance(value, Mapping) else value))
    return f"{label} by {origin(value)}" if callable(value) else label


def control_of(control: Mapping[str, Any] | None) -> Control | str | None:
    """Residuals of ControlNets and T2I adapters in our slots, or which of them is none; the host's lists stay as they
    are.

    Forge's forward takes from the end of each list: the last of input and output belong to the first input and output
    block, and of middle it takes the last alone.
    """
    if not control:
        return None
    slots = {part: tuple(control.get(part) or ()) for part in ("input", "middle", "output")}
    for part, residuals in slots.items():
        for residual in residuals:
            if residual is not None and not isinstance(residual, Tensor):
                return f"control[{part}] holds a {type(residual).__name__}"
    found = Control(slots["input"][::-1], slots["middle"][-1:], slots["output"][::-1])
    return found if any(residual is not None for part in slots.values() for residual in part) else None


def copied_lists(control: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """control for the host's forward, which empties the lists that it is given: it may have to run again."""
    if control is None:
        return None
    return {part: list(values) if isinstance(values, list) else values for part, values in control.items()}

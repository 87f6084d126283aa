"""What users put on a UNet of the Forge family that our forward computes itself: image prompts, FreeU, Kohya's hires
fix and perturbed attention.

Extensions hand over functions, which are recognised by their source; see KNOWN for whose. Anything else is a function
that our forward calls (patches.py). The first use of a shape is compared with the host, as ever.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from ...core.additions import FreeU, PerturbedAttention, Shrink
from ...core.refusal import Refusal
from ..additions import NO_ADDITIONS, Additions, freeu_of
from .image_prompts import ATTENTION as CROSS_ATTENTION
from .image_prompts import queries_at, read_image_prompts, source_digest
from .patches import PATCHES, REPLACED

log = logging.getLogger("onediff")

SELF_ATTENTION, JOIN = "attn1", "output_block_patch"
AFTER_STAGE, AFTER_SKIP = "input_block_patch", "input_block_patch_after_skip"
FREEU, FREEU_2, FOURIER, SMALLER, LARGER, RESIZE, PERTURBED = (
    "FreeU", "FreeU 2", "its Fourier filter", "smaller", "larger", "resize", "perturbed attention"
)
# What a function computes, by the digest of its source; two where Python 3.10 writes it in another way than later ones.
KNOWN = {
    # Forge of June 2025.
    "655b4863f5bea0d9": FREEU_2, "9dc1f3ce6dfae0ff": FREEU_2,
    "73bcdb0d98c071a6": SMALLER, "eb8508a8dbb622cd": LARGER, "fae5b85bb6e4e13a": RESIZE,
    "a13a272f75888b86": PERTURBED,
    # reForge of March 2026.
    "d1b5dc1df83ab3a7": FREEU, "42a34814c88114bc": FREEU_2, "2641c66261b2007d": FREEU_2,
    "f3027b6146f82683": SMALLER, "66d6189ab2190b73": LARGER, "e3635f84bea7dbfb": RESIZE,
    # Both.
    "c4edb64fcabdfbcc": FOURIER, "3571b01127dc9189": FOURIER,
}
# With these, the hosts resize as torch.nn.functional.interpolate does.
MODES = frozenset({"bicubic", "bilinear", "area", "nearest-exact"})
# Where FreeU of Forge says whether it works at this step.
FREEU_SWITCH = "FreeUForForge"


def read_additions(unet: nn.Module, options: Mapping[str, Any], latent: Tensor) -> Additions:
    """options: the call's transformer_options. latent: of the call, (batch, channels, height, width)."""
    replaced = options.get(REPLACED) or {}
    if not options.get(PATCHES) and not replaced:
        return NO_ADDITIONS
    found = NO_ADDITIONS
    if replaced.get(CROSS_ATTENTION):
        try:
            prompts = read_image_prompts(unet, replaced[CROSS_ATTENTION], options, latent)
            found = found._replace(image_prompts=prompts, stand_for=frozenset({CROSS_ATTENTION}))
        except Refusal as reason:
            log.debug("what stands for cross attentions is called as it is: %s", reason)
    alone = replaced.get(SELF_ATTENTION) or {}
    if alone and all(kind_of(function) == PERTURBED for function in alone.values()):
        queries = frozenset(path for place in alone for path in queries_at(unet, place, SELF_ATTENTION))
        found = found._replace(
            perturbed=perturbed_attention(queries), stand_for=found.stand_for | {SELF_ATTENTION}
        )
    elif alone:
        # Self-attention guidance reads what the functions of the hires fix take down.
        return found
    return with_stages(found, unet, options, latent.device)


@lru_cache(maxsize=16)
def perturbed_attention(queries: frozenset[str]) -> PerturbedAttention:
    """The same object for every call: it computes a digest of its queries once."""
    return PerturbedAttention(queries, first_row=0)


def with_stages(found: Additions, unet: nn.Module, options: Mapping[str, Any], device: torch.device) -> Additions:
    """found, with what stands at stages where all of it is known: FreeU, the hires fix, or both in this order."""
    lists = options.get(PATCHES) or {}
    joins = list(lists.get(JOIN) or ())
    inputs = [(name, function) for name in (AFTER_STAGE, AFTER_SKIP) for function in lists.get(name) or ()]
    kinds = [kind_of(function) for function in joins]
    freeus = [kind for kind in kinds[:1] if kind in (FREEU, FREEU_2)]
    if kinds not in (freeus, [*freeus, LARGER]):
        return found
    stand_for = {JOIN}
    shrink: Shrink | None = None
    if LARGER in kinds:
        if len(inputs) != 1 or kind_of(inputs[0][1]) != SMALLER or options.get("sigmas") is None:
            return found
        name, smaller = inputs[0]
        there, here = closure_of(smaller), closure_of(joins[-1])
        if not {there["downscale_method"], here["upscale_method"]} <= MODES:
            return found
        stand_for |= {name}
        # Like the host's own function, this waits for the GPU: the size of the hidden states depends on it.
        if there["sigma_end"] <= float(options["sigmas"][0]) <= there["sigma_start"]:
            shrink = Shrink(
                int(there["block_number"]), float(there["downscale_factor"]), name == AFTER_SKIP,
                there["downscale_method"], here["upscale_method"],
            )
    freeu = read_freeu(unet, joins[0], kinds[0] == FREEU_2, device) if freeus else None
    return found._replace(freeu=freeu, shrink=shrink, stand_for=found.stand_for | stand_for)


def read_freeu(unet: Any, function: Any, follows_mean: bool, device: torch.device) -> FreeU | None:
    """None at a step where it rests."""
    switch = function.__globals__.get(FREEU_SWITCH)
    if switch is not None and not switch.doFreeU:
        return None
    by_width = closure_of(function)["scale_dict"]
    blocks = [unet.middle_block[0], *(stage[0] for stage in unet.output_blocks)][:-1]
    return freeu_of(tuple(by_width.get(block.out_layers[-1].out_channels) for block in blocks), follows_mean, device)


def kind_of(function: Any) -> str | None:
    """What a function is known to compute, with the functions that it calls; None for all others."""
    code = getattr(function, "__code__", None)
    kind = None if code is None else kind_of_code(code)
    if kind in (FREEU, FREEU_2):
        return kind if kind_of(function.__globals__.get("Fourier_filter")) == FOURIER else None
    if kind in (SMALLER, LARGER):
        return kind if kind_of(resize_of(function)) == RESIZE else None
    return kind


@lru_cache(maxsize=256)
def kind_of_code(code: CodeType) -> str | None:
    return KNOWN.get(source_digest(code) or "")


def resize_of(function: Any) -> Any:
    """What the functions of the hires fix resize with."""
    names, known = function.__code__.co_names, function.__globals__
    if "ldm_patched" in names:
        return known["ldm_patched"].modules.utils.common_upscale
    return known.get("adaptive_resize")


def closure_of(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function has taken along from where it was made, by name."""
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))

"""Reads the IP-Adapters of Forge and Forge Neo as image prompts, which our forward computes itself.

An IP-Adapter replaces cross attentions by objects of its own (patches_replace). Their class is recognised by its
source. Any other replacement is called as a function of an extension (patches.py).
"""
from __future__ import annotations

import ast
import hashlib
import inspect
import logging
import textwrap
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ...core.refusal import Refusal
from ...families.unet.call import ImagePrompt
from ...families.unet.patch_points import CROSS_ATTENTION
from .patches import REPLACED

log = logging.getLogger("onediff")

# The source_digest of CrossAttentionPatch.__call__ in lib_ipadapter, in Forge (June 2025) and in Forge Neo 2.26. All
# Pythons from 3.10 on give the same digests.
KNOWN = {"8e182e7ffcc7ecf0", "6fad6df6ee380c99"}
# The path of a cross attention's query, made of the stage's path, the layer's index in the stage, and the block's index
# in the layer.
QUERY = "{}.{}.transformer_blocks.{}.attn2.to_q"
# sigma_start and sigma_end of an adapter that is on at every step: the host's percent_to_sigma of 0 and of 1.
ANY_SIGMA = (999999999.9, 0.0)


def image_prompts_of(unet: nn.Module, options: Mapping[str, Any], latent: Tensor) -> tuple[ImagePrompt, ...]:
    """The image prompts of a call, one for each IP-Adapter. () without IP-Adapters; also () if anything else replaces
    cross attentions too, or an adapter has settings that our forward does not compute: then the caller must run all
    functions that replace cross attentions as patches.

    options: the call's transformer_options. latent: the call's; the keys and values of the image get its number of
    rows, dtype and device. The keys and values are computed at every call, as by the host.
    """
    functions = (options.get(REPLACED) or {}).get(CROSS_ATTENTION)
    try:
        return read_image_prompts(unet, functions, options, latent) if functions else ()
    except Refusal as reason:
        log.debug("the functions that replace cross attentions are called: %s", reason)
        return ()


def read_image_prompts(
    unet: nn.Module, functions: Mapping[Any, Any], options: Mapping[str, Any], latent: Tensor
) -> tuple[ImagePrompt, ...]:
    """The image prompts of a call, one for each IP-Adapter. Raises Refusal if one of these functions is not an
    IP-Adapter that our forward can compute; image_prompts_of then returns ().

    functions: the functions in the options that replace cross attentions, at least one, by their key in the options
        (see queries_at).
    unet, options, latent: see image_prompts_of.
    """
    if not all(source_digest(kind.__call__) in KNOWN for kind in set(map(type, functions.values()))):
        raise Refusal("OneDiff does not know the code of these functions, so they may not be IP-Adapters")
    # For each part of the batch: 0 for the prompt, 1 for the negative prompt.
    order = tuple(options.get("cond_or_uncond") or ())
    first = next(iter(functions.values()))
    count = len(first.weights)
    rows = latent.shape[0]
    if not order or rows % len(order):
        raise Refusal("this batch does not consist of equal parts for the prompt and the negative prompt")
    if any(len(one.weights) != count for one in functions.values()):
        raise Refusal("not all layers of the model use the same number of IP-Adapters")
    places = {key: queries_at(unet, key) for key in functions}
    if options.get("ad_params") is not None or not all(places.values()):
        raise Refusal("AnimateDiff is used, or an IP-Adapter changes layers that are not cross attentions")
    of_rows = [part for part in order for _ in range(rows // len(order))]
    sigmas = options.get("sigmas")
    return tuple(image_prompt(functions, places, index, of_rows, latent, sigmas) for index in range(count))


def image_prompt(
    functions: Mapping[Any, Any], places: Mapping[Any, list[str]], index: int, of_rows: list[int], latent: Tensor,
    sigmas: Tensor | None,
) -> ImagePrompt:
    """The image prompt of one IP-Adapter: computes its keys and values for each cross attention. Raises Refusal if the
    adapter has settings that our forward does not compute.

    functions: see read_image_prompts.
    places: for each key in `functions`, the paths of the queries of the cross attentions that the function replaces.
    index: the adapter's, in the lists of settings that each function has.
    of_rows: for each row of the batch, 0 for the prompt or 1 for the negative prompt.
    latent: the call's.
    sigmas: the noise level of the step, (images,), for adapters that are on in a range of steps only. None if unknown:
        such an adapter then adds nothing unless its range includes the first step.
    """
    first = next(iter(functions.values()))
    cond = first.conds[index]
    uncond = first.unconds[index]
    weight = first.weights[index]
    same = all(settings_of(one, index) == settings_of(first, index) for one in functions.values())
    # The WebUI's own page sets no other weight type than "original".
    is_plain = first.weight_type[index].startswith("original") and not first.unfold_batch[index]
    if not same or not is_plain or first.masks[index] is not None:
        raise Refusal("an IP-Adapter has a mask, a weight type or other settings that OneDiff does not support")
    if cond.shape[0] != 1 or uncond.shape != cond.shape:
        raise Refusal(f"an IP-Adapter's image tokens have the shapes {tuple(cond.shape)} and {tuple(uncond.shape)}")
    tokens = torch.cat([cond, uncond])
    projected: list[Tensor] = []
    columns: dict[str, tuple[int, int]] = {}
    width = 0
    for key, one in functions.items():
        layers = one.ipadapters[index].ip_layers.to_kvs
        keys = layers[one.k_key](tokens)
        values = layers[one.v_key](tokens) * weight
        projected += keys, values
        taken = keys.shape[-1] + values.shape[-1]
        columns |= dict.fromkeys(places[key], (width, taken))
        width += taken
    key_values = torch.cat(projected, dim=-1)[of_rows].to(latent)
    start = float(first.sigma_start[index])
    end = float(first.sigma_end[index])
    if (start, end) != ANY_SIGMA:
        # Outside of these sigmas the adapter adds nothing: its values are multiplied by 0. Comparing on the GPU does
        # not wait for it, as reading the sigma would.
        sigma = torch.tensor(ANY_SIGMA[0], dtype=torch.float64, device="cpu") if sigmas is None else sigmas[0].double()
        key_values = key_values * ((sigma <= start) & (sigma >= end)).to(key_values)
    return ImagePrompt(key_values, columns)


def settings_of(function: Any, index: int) -> tuple[Any, ...]:
    """The settings of one adapter (index) in the function of one cross attention, as a tuple that is equal for equal
    settings. It has the ids of tensors and objects. The caller compares the functions of all cross attentions, which
    must have the same settings."""
    tensors = function.conds, function.unconds, function.masks, function.ipadapters
    numbers = (
        function.weights, function.weight_type, function.sigma_start, function.sigma_end, function.unfold_batch
    )
    return (*(id(of[index]) for of in tensors), *(of[index] for of in numbers))


@lru_cache(maxsize=64)
def source_digest(function: Any) -> str | None:
    """A digest of a function's source, which recognises known code (KNOWN). It does not depend on formatting and
    comments. None if the source is not available."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
        return hashlib.sha256(ast.unparse(ast.parse(source)).encode()).hexdigest()[:16]
    except (OSError, TypeError, SyntaxError):
        return None


def queries_at(unet: nn.Module, key: tuple[Any, ...]) -> list[str]:
    """The paths in the UNet of the query layers of the cross attentions that a key of patches_replace means:
    ("input", 4) for all transformer blocks of a stage, ("input", 4, 0) for the first block of the stage. [] if the UNet
    has no such stage or block."""
    part, index, *block = key
    stage_path = "middle_block" if part == "middle" else f"{part}_blocks.{index}"
    try:
        stage: Any = unet.get_submodule(stage_path)
    except AttributeError:
        return []
    return [
        QUERY.format(stage_path, place, number)
        for place, layer in enumerate(stage) if hasattr(layer, "transformer_blocks")
        for number in range(len(layer.transformer_blocks)) if not block or number == block[0]
    ]

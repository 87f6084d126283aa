"""IP-Adapters of Forge and Forge Neo, as image prompts that our forward computes itself.

What an IP-Adapter puts in the place of cross attentions is recognised by its source. Anything else there is a function
like any other (patches.py). The first use of a shape is compared with the host, as ever.
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

# lib_ipadapter's CrossAttentionPatch of Forge (June 2025) and Forge Neo 2.26, as Python 3.10 and later ones write it.
KNOWN = {"8e182e7ffcc7ecf0", "6fad6df6ee380c99"}
QUERY = "{}.{}.transformer_blocks.{}.attn2.to_q"
# What percent_to_sigma of the host returns for 0 and 1: at every step.
ANY_SIGMA = (999999999.9, 0.0)


def image_prompts_of(unet: nn.Module, options: Mapping[str, Any], latent: Tensor) -> tuple[ImagePrompt, ...]:
    """What stands for cross attentions, one for each adapter at this step's sigma; none where something else stands
    there, or an adapter is used in a way that only the host knows. options: the call's transformer_options. Computed at
    every call, as the host does."""
    functions = (options.get(REPLACED) or {}).get(CROSS_ATTENTION)
    try:
        return read_image_prompts(unet, functions, options, latent) if functions else ()
    except Refusal as reason:
        log.debug("what stands for cross attentions is called as it is: %s", reason)
        return ()


def read_image_prompts(
    unet: nn.Module, functions: Mapping[Any, Any], options: Mapping[str, Any], latent: Tensor
) -> tuple[ImagePrompt, ...]:
    """As image_prompts_of. functions: what stands for cross attentions, by place. Raises Refusal with the reason."""
    if not all(source_digest(kind.__call__) in KNOWN for kind in set(map(type, functions.values()))):
        raise Refusal("they are not IP-Adapters that OneDiff knows")
    # Whether each part of the batch is of the prompt (0) or the negative one (1).
    order, first = tuple(options.get("cond_or_uncond") or ()), next(iter(functions.values()))
    count, rows = len(first.weights), latent.shape[0]
    if not order or rows % len(order) or any(len(one.weights) != count for one in functions.values()):
        raise Refusal("layers have different numbers of rows or adapters")
    places = {key: queries_at(unet, key) for key in functions}
    if options.get("ad_params") is not None or not all(places.values()):
        raise Refusal("they are not at an image prompt's layers")
    of_rows, sigmas = [part for part in order for _ in range(rows // len(order))], options.get("sigmas")
    return tuple(image_prompt(functions, places, index, of_rows, latent, sigmas) for index in range(count))


def image_prompt(
    functions: Mapping[Any, Any], places: Mapping[Any, list[str]], index: int, of_rows: list[int], latent: Tensor,
    sigmas: Tensor | None,
) -> ImagePrompt:
    """What one adapter adds. places: the paths of the queries at each place. of_rows: for each row of the batch, which
    prompt it has: 0 or 1. sigmas: of the step."""
    first = next(iter(functions.values()))
    cond, uncond, weight = first.conds[index], first.unconds[index], first.weights[index]
    same = all(settings_of(one, index) == settings_of(first, index) for one in functions.values())
    # "original" is the one way in which the host's page uses them.
    is_plain = first.weight_type[index].startswith("original") and not first.unfold_batch[index]
    if not same or not is_plain or first.masks[index] is not None:
        raise Refusal("an adapter has settings that only the WebUI knows")
    if cond.shape[0] != 1 or uncond.shape != cond.shape:
        raise Refusal(f"image tokens are {tuple(cond.shape)} and {tuple(uncond.shape)}")
    tokens = torch.cat([cond, uncond])
    projected: list[Tensor] = []
    columns: dict[str, tuple[int, int]] = {}
    width = 0
    for key, one in functions.items():
        layers = one.ipadapters[index].ip_layers.to_kvs
        keys, values = layers[one.k_key](tokens), layers[one.v_key](tokens) * weight
        projected += keys, values
        taken = keys.shape[-1] + values.shape[-1]
        columns |= dict.fromkeys(places[key], (width, taken))
        width += taken
    key_values = torch.cat(projected, dim=-1)[of_rows].to(latent)
    start, end = float(first.sigma_start[index]), float(first.sigma_end[index])
    if (start, end) != ANY_SIGMA:
        # Values of 0 add nothing, and nobody waits for the GPU to tell the sigma.
        sigma = torch.tensor(ANY_SIGMA[0], dtype=torch.float64, device="cpu") if sigmas is None else sigmas[0].double()
        key_values = key_values * ((sigma <= start) & (sigma >= end)).to(key_values)
    return ImagePrompt(key_values, columns)


def settings_of(function: Any, index: int) -> tuple[Any, ...]:
    """What of an adapter must be the same at every place."""
    tensors = function.conds, function.unconds, function.masks, function.ipadapters
    numbers = (
        function.weights, function.weight_type, function.sigma_start, function.sigma_end, function.unfold_batch
    )
    return (*(id(of[index]) for of in tensors), *(of[index] for of in numbers))


@lru_cache(maxsize=64)
def source_digest(function: Any) -> str | None:
    """Of what a function does, however it is laid out; None where its source cannot be had."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
        return hashlib.sha256(ast.unparse(ast.parse(source)).encode()).hexdigest()[:16]
    except (OSError, TypeError, SyntaxError):
        return None


def queries_at(unet: nn.Module, key: tuple[Any, ...]) -> list[str]:
    """The paths of the queries of the cross attentions at a place: ("input", 4), or ("input", 4, 0) for one block."""
    part, index, *block = key
    stage_path = "middle_block" if part == "middle" else f"{part}_blocks.{index}"
    stage: Any = unet.get_submodule(stage_path)
    return [
        QUERY.format(stage_path, place, number)
        for place, layer in enumerate(stage) if hasattr(layer, "transformer_blocks")
        for number in range(len(layer.transformer_blocks)) if not block or number == block[0]
    ]

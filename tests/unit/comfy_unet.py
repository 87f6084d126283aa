"""A forward over ldm's layers that calls functions of extensions as hosts of the Forge family do, written from those
hosts' behaviour: the reference for our own forward with the same functions."""
from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from ldm.modules.attention import SpatialTransformer
from ldm.modules.diffusionmodules.openaimodel import ResBlock, Upsample
from ldm.modules.diffusionmodules.util import timestep_embedding
from torch import Tensor, nn
from torch.nn import functional

from lib_onediff.families.unet.call import Control, UNetCall


@torch.no_grad()
def patched_output(unet: Any, call: UNetCall, options: dict[str, Any] | None = None) -> Tensor:
    """The output of ldm's UNet for a call with its ControlNet residuals (call.control). options: transformer_options,
    whose functions are called as Forge's own forward calls them."""
    return Comfy(unet, call, options or {}).run()


class Comfy:
    def __init__(self, unet: Any, call: UNetCall, options: dict[str, Any]) -> None:
        self.unet = unet
        self.call = call
        self.options = options
        self.patches = options.get("patches", {})
        self.replaced = options.get("patches_replace", {})

    def run(self) -> Tensor:
        unet = self.unet
        options = self.options
        control = self.call.control or Control()
        options.update(original_shape=list(self.call.latent.shape), transformer_index=0)
        emb = unet.time_embed(timestep_embedding(self.call.timestep, unet.model_channels))
        emb = self.listed("emb_patch", emb, unet.model_channels, options)
        h = self.call.latent
        skips = []
        for index, module in enumerate(unet.input_blocks):
            h = added(self.stage(("input", index), module, h, emb), control.input[index:index + 1])
            h = self.listed("input_block_patch", h, options)
            skips.append(h)
            h = self.listed("input_block_patch_after_skip", h, options)
        h = added(self.stage(("middle", 0), unet.middle_block, h, emb), control.middle)
        for index, module in enumerate(unet.output_blocks):
            options["block"] = ("output", index)
            skip = added(skips.pop(), control.output[index:index + 1])
            for patch in self.patches.get("output_block_patch", ()):
                h, skip = patch(h, skip, options)
            # A1111 resizes so at odd sizes.
            h = functional.interpolate(h, skip.shape[2:], mode="nearest")
            h = self.stage(("output", index), module, torch.cat([h, skip], dim=1), emb)
        options["block"] = ("last", 0)
        return self.modified(unet.out[1:](self.normed(unet.out[0], self.modified(h, "before"))), "after")

    def listed(self, name: str, value: Tensor, *others: Any) -> Tensor:
        for patch in self.patches.get(name, ()):
            value = patch(value, *others)
        return value

    def modified(self, h: Tensor, when: str) -> Tensor:
        for modifier in self.options.get("block_modifiers", ()):
            h = modifier(h, when, self.options)
        return h

    def normed(self, norm: nn.Module, h: Tensor) -> Tensor:
        wrapper = self.options.get("group_norm_wrapper")
        return norm(h) if wrapper is None else wrapper(norm, h, self.options)

    def stage(self, block: tuple[str, int], module: Any, h: Tensor, emb: Tensor) -> Tensor:
        self.options["block"] = block
        h = self.modified(h, "before")
        for layer in module:
            if isinstance(layer, ResBlock):
                hidden = layer.in_layers[1:](self.normed(layer.in_layers[0], h))
                hidden = hidden + layer.emb_layers(emb)[:, :, None, None]
                h = layer.skip_connection(h) + layer.out_layers[1:](self.normed(layer.out_layers[0], hidden))
            elif isinstance(layer, SpatialTransformer):
                h = self.transformer(layer, h)
                self.options["transformer_index"] += 1
            elif isinstance(layer, Upsample):
                h = layer.conv(functional.interpolate(h, scale_factor=2))
            else:
                h = layer(h)
        return self.modified(h, "after")

    def transformer(self, layer: Any, h: Tensor) -> Tensor:
        height, width = h.shape[2:]
        x = rearrange(layer.proj_in(layer.norm(h)), "b c h w -> b (h w) c").contiguous()
        for index, block in enumerate(layer.transformer_blocks):
            self.options["block_index"] = index
            x = self.block(block, x)
        return h + layer.proj_out(rearrange(x, "b (h w) c -> b c h w", h=height, w=width))

    def block(self, block: Any, x: Tensor) -> Tensor:
        extra = {name: value for name, value in self.options.items() if name not in ("patches", "patches_replace")}
        extra |= {"n_heads": block.attn1.heads, "dim_head": block.attn1.to_q.out_features // block.attn1.heads}
        normed = block.norm1(x)
        x = x + self.attention("attn1", block.attn1, normed, normed, extra)
        x = self.listed("middle_patch", x, extra)
        x = x + self.attention("attn2", block.attn2, block.norm2(x), self.call.context, extra)
        return x + block.ff(block.norm3(x))

    def attention(self, name: str, module: Any, normed: Tensor, context: Tensor, extra: dict[str, Any]) -> Tensor:
        given = normed, context, context
        for patch in self.patches.get(f"{name}_patch", ()):
            given = patch(*given, extra)
        query = module.to_q(given[0])
        key = module.to_k(given[1])
        value = module.to_v(given[2])
        by_block = self.replaced.get(name, {})
        place = self.options["block"]
        replacement = by_block.get((*place, self.options["block_index"])) or by_block.get(place)
        mixed = attended(query, key, value, extra) if replacement is None else replacement(query, key, value, extra)
        return self.listed(f"{name}_output_patch", module.to_out(mixed), extra)


def added(h: Tensor, residuals: tuple[Tensor | None, ...]) -> Tensor:
    for residual in residuals:
        h = h if residual is None else h + residual
    return h


def attended(query: Tensor, key: Tensor, value: Tensor, extra: dict[str, Any]) -> Tensor:
    """Attention over (batch, tokens, heads * width); extensions call it in the functions by which they replace the
    host's attention."""
    heads = [rearrange(part, "b t (h d) -> b h t d", h=extra["n_heads"]) for part in (query, key, value)]
    return rearrange(functional.scaled_dot_product_attention(*heads), "b h t d -> b t (h d)")

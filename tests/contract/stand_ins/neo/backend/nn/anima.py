"""Forge Neo's Anima, whose transformer is that of Cosmos-Predict2, without fused layers."""
from __future__ import annotations

import math
from typing import Any

import comfy_kitchen as ck
import torch
from backend.args import dynamic_args
from backend.attention import attention_function
from backend.utils import pad_to_patch_size
from torch import Tensor, nn
from torch.nn import functional

BASE = 10000.0
EPS = 1e-6
_fn = torch.addcmul


def linear(into: int, out: int) -> nn.Module:
    return nn.Linear(into, out, bias=False)


def norm(width: int) -> nn.Module:
    return nn.LayerNorm(width, elementwise_affine=False, eps=EPS)


def modulation(width: int, rank: int, parts: int) -> nn.Module:
    return nn.Sequential(nn.SiLU(), linear(width, rank), linear(rank, parts * width))


class Parts(nn.Module):
    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Positions(nn.Module):
    def __init__(self, width: int, ratios: dict[str, float]) -> None:
        """width: the width of an attention head. ratios: the factor by which each axis (t, h, w) may be longer than in
        training."""
        super().__init__()
        space = width // 6 * 2
        for name, part in (("spatial", space), ("temporal", width - 2 * space)):
            self.register_buffer(f"dim_{name}_range", torch.arange(0, part, 2).float() / part, persistent=False)
        for axis, ratio in ratios.items():
            part = width - 2 * space if axis == "t" else space
            setattr(self, f"{axis}_ntk_factor", ratio ** (part / (part - 2)))

    def forward(self, counts: Any) -> Tensor:
        """The rotary embedding of all tokens, (tokens, width / 2), complex numbers of absolute value 1."""
        exponents = self.dim_temporal_range, self.dim_spatial_range, self.dim_spatial_range
        factors = self.t_ntk_factor, self.h_ntk_factor, self.w_ntk_factor
        device = exponents[0].device
        places = torch.cartesian_prod(*(torch.arange(count, device=device).float() for count in counts)).unbind(1)
        angles = torch.cat([
            place[:, None] * (1 / (BASE * factor) ** exponent.half()).float()
            for place, factor, exponent in zip(places, factors, exponents, strict=True)
        ], dim=1)
        return torch.polar(torch.ones_like(angles), angles)


class Attention(nn.Module):
    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.n_heads = heads
        self.q_proj = linear(width, width)
        self.k_proj = linear(context, width)
        self.v_proj = linear(context, width)
        self.q_norm, self.k_norm = (nn.RMSNorm(width // heads, eps=EPS) for _ in range(2))
        self.output_proj = linear(width, width)

    def forward(self, x: Tensor, context: Any = None, rotary: Any = None, options: Any = None) -> Tensor:
        context = x if context is None else context
        split = lambda rows: rows.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)  # noqa: E731
        q = self.q_norm(split(self.q_proj(x)))
        k = self.k_norm(split(self.k_proj(context)))
        v = self.v_proj(context)
        if rotary is not None:
            q, k = (ck.apply_rope_split_half(heads, rotary) for heads in (q, k))
        return self.compute_attention(q, k, split(v), options)

    def compute_attention(self, q: Tensor, k: Tensor, v: Tensor, options: Any) -> Tensor:
        return self.output_proj(self.torch_attention_op(q, k, v, options))

    def torch_attention_op(self, q: Tensor, k: Tensor, v: Tensor, options: Any) -> Tensor:
        return attention_function(q, k, v, self.n_heads, skip_reshape=True, transformer_options=options)


class Block(nn.Module):
    def __init__(self, width: int, context: int, heads: int, rank: int) -> None:
        super().__init__()
        self.self_attn = Attention(width, width, heads)
        self.cross_attn = Attention(width, context, heads)
        self.mlp = Parts(layer1=linear(width, 4 * width), activation=nn.GELU(), layer2=linear(4 * width, width))
        for place in ("self_attn", "cross_attn", "mlp"):
            setattr(self, f"layer_norm_{place}", norm(width))
            setattr(self, f"adaln_modulation_{place}", modulation(width, rank, 3))

    def forward(self, x: Tensor, time: Tensor, shared: Tensor, context: Tensor, rotary: Tensor, options: Any) -> Tensor:
        layers = {
            "self_attn": lambda rows: self.self_attn(rows, rotary=rotary, options=options),
            "cross_attn": lambda rows: self.cross_attn(rows, context, options=options),
            "mlp": lambda rows: self.mlp.layer2(self.mlp.activation(self.mlp.layer1(rows))),
        }
        for place, layer in layers.items():
            made = getattr(self, f"adaln_modulation_{place}")(time) + shared
            shift, scale, gate = made.unsqueeze(1).chunk(3, dim=-1)
            normed = _fn(shift, getattr(self, f"layer_norm_{place}")(x), 1 + scale)
            x = x + gate.to(x.dtype) * layer(normed.to(time.dtype)).to(x.dtype)
        return x


class Anima(nn.Module):
    def __init__(self, channels: int, width: int, context: int, heads: int, rank: int, blocks: int) -> None:
        super().__init__()
        self.in_channels = self.out_channels = channels
        self.patch_spatial = 2
        self.patch_temporal = 1
        self.pos_embedder = Positions(width // heads, {"t": 1.0, "h": 4.0, "w": 3.0})
        embedding = Parts(linear_1=linear(width, width), activation=nn.SiLU(), linear_2=linear(width, 3 * width))
        self.t_embedder = nn.Sequential(Parts(num_channels=width), embedding)
        self.t_embedding_norm = nn.RMSNorm(width, eps=EPS)
        self.x_embedder = Parts(proj=nn.Sequential(nn.Identity(), linear((channels + 1) * 4, width)))
        self.blocks = nn.ModuleList(Block(width, context, heads, rank) for _ in range(blocks))
        self.final_layer = Parts(
            layer_norm=norm(width), adaln_modulation=modulation(width, rank, 2), linear=linear(width, channels * 4),
        )

    def forward(self, x: Tensor, timesteps: Tensor, context: Tensor, padding_mask: Any = None, **kwargs: Any) -> Tensor:
        frames, height, width = x.shape[-3:]
        for latent in dynamic_args.ref_latents:
            x = torch.cat([x, latent.to(x).expand(len(x), -1, -1, -1, -1)], dim=2)
        x = pad_to_patch_size(x, (self.patch_temporal, self.patch_spatial, self.patch_spatial))
        x = self.prepare_embedded_sequence(x, padding_mask)
        counts = x.shape[1:4]
        context = context.flatten(1, -2)
        embedding = self.t_embedder[1]
        half = self.t_embedder[0].num_channels // 2
        place = torch.arange(half, device=x.device).float() / half
        angles = timesteps.float()[:, None] * torch.exp(-math.log(BASE) * place)
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1).to(x.dtype)
        shared = embedding.linear_2(functional.silu(embedding.linear_1(waves)))
        time = self.t_embedding_norm(waves)
        rotary = self.pos_embedder(counts)
        x = x.flatten(1, 3).to(torch.float32 if x.dtype == torch.float16 else x.dtype)
        for block in self.blocks:
            x = block(x, time, shared, context, rotary, kwargs.get("transformer_options", {}))
        made = self.final_layer.adaln_modulation(time) + shared[:, :2 * x.shape[-1]]
        shift, scale = made.unsqueeze(1).chunk(2, dim=-1)
        x = self.final_layer.linear(self.final_layer.layer_norm(x.to(context.dtype)) * (1 + scale) + shift)
        return self.unpatchify(x, counts)[:, :, :frames, :height, :width]

    def prepare_embedded_sequence(self, x: Tensor, padding_mask: Any) -> Tensor:
        mask = x.new_zeros(len(x), 1, *x.shape[-2:]) if padding_mask is None else padding_mask
        x = torch.cat([x, mask.unsqueeze(2).expand(-1, -1, x.shape[2], -1, -1)], dim=1)
        # (batch, frames, rows, columns, channels and pixels of a patch)
        return self.x_embedder.proj(functional.pixel_unshuffle(x.transpose(1, 2), 2).movedim(2, -1))

    def unpatchify(self, x: Tensor, counts: Any) -> Tensor:
        # Here, within a patch, the channels come after the pixels.
        x = x.unflatten(1, counts).unflatten(-1, (-1, self.out_channels)).transpose(-1, -2).flatten(-2).movedim(-1, 2)
        return functional.pixel_shuffle(x, 2).transpose(1, 2)

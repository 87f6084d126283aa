"""The networks of Z-Image and Lumina 2 in Forge Neo, with Neo's names of classes and attributes."""
from __future__ import annotations

import math
from typing import Any

import torch
from backend.attention import attention_function
from backend.nn.flux import EmbedND, apply_rope
from backend.utils import fp16_fix as clamp_fp16
from backend.utils import pad_to_patch_size
from torch import Tensor, nn
from torch.nn import functional

EPS = 1e-5
WAVES = 64


class TimestepEmbedder(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WAVES, width), nn.SiLU(), nn.Linear(width, out))
        self.frequency_embedding_size = WAVES

    def forward(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        place = torch.arange(WAVES // 2, dtype=torch.float32, device=t.device) / (WAVES // 2)
        angles = t[:, None].float() * torch.exp(-math.log(10000.0) * place)
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype))


class JointAttention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.n_local_heads = heads
        self.n_local_kv_heads = kv_heads
        self.head_dim = width // heads
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim)
        self.k_norm = nn.RMSNorm(self.head_dim)

    def forward(self, x: Tensor, mask: Any, freqs: Any, options: Any) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split([self.n_local_heads, self.n_local_kv_heads, self.n_local_kv_heads], dim=1)
        q, k = apply_rope(self.q_norm(q), self.k_norm(k), freqs)
        k, v = (one.repeat_interleave(self.n_local_heads // self.n_local_kv_heads, dim=1) for one in (k, v))
        return self.out(attention_function(
            q, k, v, self.n_local_heads, mask, skip_reshape=True, transformer_options=options,
        ))


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(clamp_fp16(functional.silu(self.w1(x)) * self.w3(x)))


class JointTransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, modulation: bool, before: Any, time: int) -> None:
        super().__init__()
        self.attention = JointAttention(width, heads, kv_heads)
        self.feed_forward = FeedForward(width, 2 * width)
        self.attention_norm1 = nn.RMSNorm(width, eps=EPS)
        self.ffn_norm1 = nn.RMSNorm(width, eps=EPS)
        self.attention_norm2 = nn.RMSNorm(width, eps=EPS)
        self.ffn_norm2 = nn.RMSNorm(width, eps=EPS)
        self.modulation = modulation
        if modulation:
            self.adaLN_modulation = nn.Sequential(*before, nn.Linear(time, 4 * width))

    def forward(self, x: Tensor, mask: Any, freqs: Any, time: Tensor | None, options: Any) -> Tensor:
        scale = mlp_scale = torch.zeros_like(x[:, :1])
        gate = mlp_gate = torch.ones_like(scale)
        if time is not None:
            scale, gate, mlp_scale, mlp_gate = self.adaLN_modulation(time)[:, None].chunk(4, dim=-1)
            gate = gate.tanh()
            mlp_gate = mlp_gate.tanh()
        mixed = self.attention(self.attention_norm1(x) * (1 + scale), mask, freqs, options)
        x = x + gate * self.attention_norm2(clamp_fp16(mixed))
        return x + mlp_gate * self.ffn_norm2(clamp_fp16(self.feed_forward(self.ffn_norm1(x) * (1 + mlp_scale))))


class FinalLayer(nn.Module):
    def __init__(self, width: int, out: int, time: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(width, out)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(time, width))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.linear(self.norm_final(x) * (1 + self.adaLN_modulation(time)[:, None]))


class NextDiT(nn.Module):
    def __init__(
        self, in_channels: int, dim: int, n_heads: int, n_kv_heads: int, cap_feat_dim: int, axes_dims: list[int],
        n_layers: int = 2, z_image_modulation: bool = False, time_scale: float = 1.0,
        pad_tokens_multiple: int | None = None, rope_theta: float = 256.0,
    ) -> None:
        super().__init__()
        self.patch_size = 2
        self.out_channels = in_channels
        self.time_scale = time_scale
        self.pad_tokens_multiple = pad_tokens_multiple
        self.x_embedder = nn.Linear(4 * in_channels, dim)
        self.clip_text_pooled_proj = None
        time = 32 if z_image_modulation else dim
        before = () if z_image_modulation else (nn.SiLU(),)

        def blocks(count: int, modulation: bool) -> nn.ModuleList:
            return nn.ModuleList(
                JointTransformerBlock(dim, n_heads, n_kv_heads, modulation, before, time) for _ in range(count)
            )

        self.noise_refiner = blocks(1, True)
        self.context_refiner = blocks(1, False)
        self.t_embedder = TimestepEmbedder(dim, time)
        self.cap_embedder = nn.Sequential(nn.RMSNorm(cap_feat_dim, eps=EPS), nn.Linear(cap_feat_dim, dim))
        self.layers = blocks(n_layers, True)
        self.final_layer = FinalLayer(dim, 4 * in_channels, time)
        if pad_tokens_multiple is not None:
            self.x_pad_token = nn.Parameter(torch.zeros(1, dim))
            self.cap_pad_token = nn.Parameter(torch.zeros(1, dim))
        self.rope_embedder = EmbedND(dim // n_heads, int(rope_theta), axes_dims)

    def filled_up(self, tokens: Tensor, token: Any) -> Tensor:
        """Tokens (batch, tokens, width), padded with `token` to a multiple of pad_tokens_multiple."""
        missing = -tokens.shape[1] % (self.pad_tokens_multiple or 1)
        return tokens if not missing else torch.cat([tokens, token.to(tokens).expand(len(tokens), missing, -1)], dim=1)

    def forward(
        self, x: Tensor, timesteps: Tensor, context: Tensor, num_tokens: Any = None, attention_mask: Any = None,
        transformer_options: Any = None, **kwargs: Any,
    ) -> Tensor:
        height, width = x.shape[2:]
        x = pad_to_patch_size(x, (self.patch_size, self.patch_size))
        rows, columns = (side // self.patch_size for side in x.shape[2:])
        time = self.t_embedder((1.0 - timesteps) * self.time_scale, x.dtype)
        prompt = self.filled_up(self.cap_embedder(context), getattr(self, "cap_pad_token", None))
        pieces = functional.pixel_unshuffle(x, self.patch_size).flatten(2).mT
        # Within a patch, the channels come last.
        pieces = pieces.unflatten(-1, (-1, self.patch_size**2)).mT.flatten(2)
        image = self.filled_up(self.x_embedder(pieces), getattr(self, "x_pad_token", None))
        length = prompt.shape[1]
        ids = torch.zeros(1, length + image.shape[1], 3, device=x.device)
        ids[:, :length, 0] = torch.arange(length) + 1.0
        ids[:, length:length + rows * columns] = torch.cartesian_prod(
            torch.full((1,), length + 1.0), torch.arange(rows).float(), torch.arange(columns).float(),
        )
        freqs = self.rope_embedder(ids.expand(len(x), -1, -1))
        for block in self.context_refiner:
            prompt = block(prompt, attention_mask, freqs[:, :, :length], None, transformer_options)
        for block in self.noise_refiner:
            image = block(image, None, freqs[:, :, length:], time, transformer_options)
        tokens = torch.cat([prompt, image], dim=1)
        for block in self.layers:
            tokens = block(tokens, None, freqs, time, transformer_options)
        pieces = self.final_layer(tokens, time)[:, length:length + rows * columns]
        pieces = pieces.unflatten(-1, (self.patch_size**2, -1)).mT.flatten(2)
        image = functional.pixel_shuffle(pieces.mT.unflatten(-1, (rows, columns)), self.patch_size)
        return -image[:, :, :height, :width]

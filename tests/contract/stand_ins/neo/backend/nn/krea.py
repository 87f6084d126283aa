"""Neo's Krea 2, with the host's class and attribute names, and no layers fused."""
from __future__ import annotations

from typing import Any

import torch
from backend.attention import attention_function
from backend.nn.flux import EmbedND, apply_rope, timestep_embedding
from backend.utils import pad_to_patch_size
from torch import Tensor, nn
from torch.nn import functional

EPS = 1e-5


def linear(into: int, out: int) -> nn.Module:
    return nn.Linear(into, out, bias=False)


def gelu() -> nn.Module:
    return nn.GELU(approximate="tanh")


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.eps = EPS
        self.scale = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        length = (wide.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return (wide / length * (1 + self.scale.float())).to(x.dtype)


class QKNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qnorm = RMSNorm(width)
        self.knorm = RMSNorm(width)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.qnorm(q), self.knorm(k)


class SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = linear(width, inner)
        self.up = linear(width, inner)
        self.down = linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kvheads: int) -> None:
        super().__init__()
        self.heads = heads
        self.kvheads = kvheads
        self.headdim = width // heads
        self.wq = linear(width, width)
        self.wk = linear(width, self.headdim * kvheads)
        self.wv = linear(width, self.headdim * kvheads)
        self.gate = linear(width, width)
        self.qknorm = QKNorm(self.headdim)
        self.wo = linear(width, width)

    def forward(self, x: Tensor, freqs: Any = None, options: Any = None) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.headdim)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv)
        )
        q, k = self.qknorm(q, k)
        if freqs is not None:
            q, k = apply_rope(q, k, freqs)
        k, v = (heads.repeat_interleave(self.heads // self.kvheads, dim=1) for heads in (k, v))
        mixed = attention_function(q, k, v, self.heads, skip_reshape=True, transformer_options=options)
        return self.wo(mixed * torch.sigmoid(self.gate(x)))


class SimpleModulation(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin = nn.Parameter(torch.zeros(2, width))

    def forward(self, vec: Tensor) -> Any:
        return (vec + self.lin.to(vec.dtype)).split(1, dim=1)


class DoubleSharedModulation(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin = nn.Parameter(torch.zeros(6 * width))

    def forward(self, vec: Tensor) -> Any:
        return (vec + self.lin.to(vec.dtype)).chunk(6, dim=-1)


class TextFusionBlock(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.prenorm = RMSNorm(width)
        self.postnorm = RMSNorm(width)
        self.attn = Attention(width, heads, heads)
        self.mlp = SwiGLU(width, inner)

    def forward(self, x: Tensor, options: Any) -> Tensor:
        x = x + self.attn(self.prenorm(x), options=options)
        return x + self.mlp(self.postnorm(x))


class TextFusionTransformer(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.layerwise_blocks = nn.ModuleList(TextFusionBlock(width, heads, inner) for _ in range(2))
        self.projector = linear(layers, 1)
        self.refiner_blocks = nn.ModuleList(TextFusionBlock(width, heads, inner) for _ in range(2))

    def forward(self, x: Tensor, options: Any) -> Tensor:
        """(batch, tokens, layers, width) -> (batch, tokens, width)."""
        rows = x.flatten(0, 1)
        for block in self.layerwise_blocks:
            rows = block(rows, options)
        x = self.projector(rows.unflatten(0, x.shape[:2]).movedim(2, 3)).squeeze(-1)
        for block in self.refiner_blocks:
            x = block(x, options)
        return x


class SingleStreamBlock(nn.Module):
    def __init__(self, width: int, heads: int, kvheads: int, inner: int) -> None:
        super().__init__()
        self.mod = DoubleSharedModulation(width)
        self.prenorm = RMSNorm(width)
        self.postnorm = RMSNorm(width)
        self.attn = Attention(width, heads, kvheads)
        self.mlp = SwiGLU(width, inner)

    def forward(self, x: Tensor, vec: Tensor, freqs: Any, options: Any) -> Tensor:
        scale, shift, gate, mlp_scale, mlp_shift, mlp_gate = self.mod(vec)
        x = x + gate * self.attn((1 + scale) * self.prenorm(x) + shift, freqs, options)
        return x + mlp_gate * self.mlp((1 + mlp_scale) * self.postnorm(x) + mlp_shift)


class LastLayer(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm = RMSNorm(width)
        self.linear = nn.Linear(width, out)
        self.modulation = SimpleModulation(width)

    def forward(self, x: Tensor, vec: Tensor) -> Tensor:
        scale, shift = self.modulation(vec)
        return self.linear((1 + scale) * self.norm(x) + shift)


class SingleStreamDiT(nn.Module):
    def __init__(
        self, features: int, heads: int, kvheads: int, layers: int, channels: int, txtdim: int, txtheads: int,
        txtlayers: int = 12, inner: int = 128, tdim: int = 64,
    ) -> None:
        super().__init__()
        self.patch = 2
        self.channels = channels
        self.tdim = tdim
        self.heads = heads
        self.txtdim = txtdim
        self.txtlayers = txtlayers
        side = 6 * (features // heads // 16)
        self.pe_embedder = EmbedND(features // heads, 1000, [features // heads - 2 * side, side, side])
        self.first = nn.Linear(4 * channels, features)
        self.blocks = nn.ModuleList(SingleStreamBlock(features, heads, kvheads, inner) for _ in range(layers))
        self.tmlp = nn.Sequential(nn.Linear(tdim, features), gelu(), nn.Linear(features, features))
        self.txtfusion = TextFusionTransformer(txtlayers, txtdim, txtheads, inner)
        self.txtmlp = nn.Sequential(
            RMSNorm(txtdim), nn.Linear(txtdim, features), gelu(), nn.Linear(features, features),
        )
        self.last = LastLayer(features, 4 * channels)
        self.tproj = nn.Sequential(gelu(), nn.Linear(features, 6 * features))

    def forward(
        self, x: Tensor, timesteps: Tensor, context: Tensor, attention_mask: Any = None,
        transformer_options: Any = None, **kwargs: Any,
    ) -> Tensor:
        shape = x.shape
        if kwargs.get("ref_latents"):
            x = x + sum(latent.to(x) for latent in kwargs["ref_latents"])
        x = x.flatten(1, 2) if x.dim() == 5 else x
        x = pad_to_patch_size(x, (self.patch, self.patch))
        rows, columns = (side // self.patch for side in x.shape[2:])
        prompt = context.squeeze(1).unflatten(-1, (self.txtlayers, self.txtdim))
        prompt = self.txtmlp(self.txtfusion(prompt, transformer_options))
        pieces = functional.pixel_unshuffle(x, self.patch).flatten(2).mT
        time = self.tmlp(timestep_embedding(timesteps, self.tdim)[:, None].to(x.dtype))
        vec = self.tproj(time)
        places = torch.cartesian_prod(torch.zeros(1), torch.arange(rows).float(), torch.arange(columns).float())
        ids = torch.cat([torch.zeros(prompt.shape[1], 3), places]).to(x.device)
        freqs = self.pe_embedder(ids[None].expand(len(x), -1, -1))
        x = torch.cat([prompt, self.first(pieces)], dim=1)
        for block in self.blocks:
            x = block(x, vec, freqs, transformer_options)
        x = self.last(x, time)[:, prompt.shape[1]:]
        x = functional.pixel_shuffle(x.mT.unflatten(2, (rows, columns)), self.patch)
        return x[..., :shape[-2], :shape[-1]].reshape(shape)

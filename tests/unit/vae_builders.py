"""Small autoencoders with all kinds of layers and random weights, and functions that decode with the host's forward or
by the runtime."""
from __future__ import annotations

import contextlib
import copy
import importlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from builders import GROUPS, randomise, with_small_groups, without_initial_values
from own_forward import own_forward
from torch import Tensor

from lib_onediff.core.settings import Settings
from lib_onediff.hosts.diffusers import read_vae as read_vae
from lib_onediff.runtime.runtime import runtime
from lib_onediff.runtime.vae.route import DecoderRoute
from lib_onediff.weights.scan import HostTraits

SD = {
    "block_out_channels": (8, 16, 32, 32), "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4, "layers_per_block": 2, "norm_num_groups": GROUPS,
}
FLUX = {**SD, "latent_channels": 16, "use_post_quant_conv": False, "use_quant_conv": False}
NO_ATTENTION = {**SD, "mid_block_add_attention": False}
ATTENTION_ON_THE_WAY_UP = {**SD, "up_block_types": ("UpDecoderBlock2D", "AttnUpDecoderBlock2D") * 2}
ONE_LAYER = {
    **SD, "block_out_channels": (8, 16), "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2, "layers_per_block": 1,
}
LAYOUTS = {
    "SD": SD, "Flux": FLUX, "no attention": NO_ATTENTION, "attention on the way up": ATTENTION_ON_THE_WAY_UP,
    "one layer": ONE_LAYER,
}
LDM = {
    # The class itself supports no fewer than 32 groups.
    "ch": 32, "out_ch": 3, "ch_mult": (1, 2, 4, 4), "num_res_blocks": 2, "attn_resolutions": [], "in_channels": 3,
    "resolution": 64, "z_channels": 4,
}
LDM_LAYOUTS = {
    "SD": {}, "Flux": {"z_channels": 16}, "attention on the way up": {"attn_resolutions": [16, 32]},
    "no attention": {"attn_type": "none"}, "one layer": {"num_res_blocks": 1, "ch_mult": (1, 2)},
}


@pytest.fixture
def fresh_route(monkeypatch: pytest.MonkeyPatch) -> Iterator[DecoderRoute]:
    """The runtime with a new route for decodes."""
    route = DecoderRoute(runtime.services)
    monkeypatch.setattr(runtime, "vae", route)
    monkeypatch.setattr(runtime.cache, "_vae", route)
    yield route
    route.release_all()


def diffusers_vae(seed: int = 0, **config: Any) -> Any:
    """A diffusers AutoencoderKL with random weights. config: overrides, as in LAYOUTS; by default one layer a block."""
    from diffusers import AutoencoderKL

    with without_initial_values():
        vae = AutoencoderKL(**(config or ONE_LAYER))
    return randomise(vae, seed)


def ldm_decoder(
    seed: int = 0, module: str = "ldm.modules.diffusionmodules.model", kind: str = "Decoder", **config: Any
) -> Any:
    """A random Decoder (or Encoder) of stable-diffusion-sdkit, or of another module with the same class."""
    found = pytest.importorskip(module, reason=f"{module} is not installed")
    with without_initial_values(), contextlib.redirect_stdout(io.StringIO()):
        decoder = getattr(found, kind)(**{**LDM, **copy.deepcopy(config)})
    return randomise(with_small_groups(decoder), seed)


def a_latent(decoder: Any, height: int = 6, width: int = 6, batch: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, decoder.conv_in.in_channels, height, width)
    return torch.randn(shape, generator=generator).to(decoder.conv_in.weight)


@torch.no_grad()
def host_picture(decoder: Any, latent: Tensor) -> Tensor:
    """The image of a latent, decoded by the forward of the decoder's own class."""
    return own_forward(decoder)(latent)


@torch.no_grad()
def routed_picture(
    decoder: Any, latent: Tensor, host_traits: HostTraits = HostTraits(),  # noqa: B008
    settings: Settings | None = None, **options: Any
) -> Tensor:
    """The image of a latent, decoded by the runtime, which chooses our forward or the host's. options: further
    arguments of DecoderRoute.decode."""
    route = runtime.vae
    route.adopt(decoder, settings, host_traits)
    return route.decode(decoder, latent, lambda: own_forward(decoder)(latent), **options)


def last_decode() -> tuple[str | None, str]:
    """The route of the last decode and its reason."""
    status = runtime.vae.status()
    return status["route"], status["reason"]


def decodes_by_route() -> dict[str, int]:
    """The number of decodes by each route."""
    return runtime.vae.status()["calls"]


def ldm_module() -> Any:
    return importlib.import_module("ldm.modules.diffusionmodules.model")


LIMIT = torch.finfo(torch.float16).max


class Host:
    """A host's forward of a decoder, which counts its decodes (calls). change: applied to their images."""

    def __init__(self, decoder: Any, change: Callable[[Tensor], Tensor] = lambda picture: picture) -> None:
        self.decoder = decoder
        self.change = change
        self.calls = 0

    def __call__(self, latent: Tensor) -> Tensor:
        self.calls += 1
        return self.change(host_picture(self.decoder, latent))


@torch.no_grad()
def decode(host: Host, latent: Tensor) -> Tensor:
    """The image of a latent, decoded by the runtime, whose host is `host`."""
    runtime.vae.adopt(host.decoder)
    return runtime.vae.decode(host.decoder, latent, lambda: host(latent))


def overflowing_in_float16(make: Callable[[], Any] = lambda: diffusers_vae().decoder) -> tuple[Any, Tensor]:
    """A decoder (or an encoder) in float16 whose activations exceed float16's largest number by a factor of two, and a
    latent for it.

    The image has the usual scale, since norms restore it: only the values between two norms are large.
    """
    decoder = make().half()
    latent = a_latent(decoder, 16, 16)
    with torch.no_grad():
        decoder.conv_in.bias.zero_()
        decoder.conv_in.weight *= 2 * LIMIT / float(copy.deepcopy(decoder.conv_in).float()(latent.float()).abs().max())
    assert torch.isfinite(decoder.conv_in.weight).all() and not host_picture(decoder, latent).isfinite().all()
    return decoder, latent


def in_float32(decoder: Any, latent: Tensor) -> Tensor:
    """The image of a latent by the host's forward, with weights and latent in float32."""
    return host_picture(copy.deepcopy(decoder).float(), latent.float())

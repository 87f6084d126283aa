"""A host's VAE whose decodes are counted, VAEs that come near to float16's limit, and what is said of them."""
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from vae_builders import a_latent, diffusers_vae, host_picture

from lib_onediff.core.settings import Settings
from lib_onediff.families.vae.forward import Decoding
from lib_onediff.runtime.runtime import runtime
from lib_onediff.runtime.vae import precision

LIMIT = torch.finfo(torch.float16).max
STEP = 1 / 255
OVERFLOWED = "decoded again in float32, because this VAE overflows in float16"
KNOWN = "decoded in float32, because this VAE overflows in float16"


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No verdict on any VAE; and float16 where it is asked for, as on a GPU."""
    monkeypatch.setattr(precision, "SLOW_ON_CPU", ())
    runtime.tuning_cache.clear()
    yield
    runtime.tuning_cache.clear()


class Host:
    """A host's VAE, whose own decodes are counted; change: what becomes of them."""

    def __init__(self, decoder: Any, change: Callable[[Tensor], Tensor] = lambda picture: picture) -> None:
        self.decoder, self.change, self.calls = decoder, change, 0

    def __call__(self, latent: Tensor) -> Tensor:
        self.calls += 1
        return self.change(host_picture(self.decoder, latent))


@torch.no_grad()
def decode(host: Host, latent: Tensor) -> Tensor:
    runtime.vae.adopt(host.decoder)
    return runtime.vae.decode(host.decoder, latent, lambda: host(latent))


def chosen(precision: str, **others: Any) -> Settings:
    settings = Settings(**others)
    object.__setattr__(settings, "vae_precision", precision)
    return settings


def overflowing(make: Callable[[], Any] = lambda: diffusers_vae().decoder) -> tuple[Any, Tensor]:
    """A decoder (or an encoder) in float16 whose activations are twice float16's limit, and a latent of its own.

    Norms make its picture what it was: only what lies between them is large.
    """
    decoder = make().half()
    latent = a_latent(decoder, 16, 16)
    with torch.no_grad():
        decoder.conv_in.bias.zero_()
        decoder.conv_in.weight *= 2 * LIMIT / float(copy.deepcopy(decoder.conv_in).float()(latent.float()).abs().max())
    assert torch.isfinite(decoder.conv_in.weight).all() and not host_picture(decoder, latent).isfinite().all()
    return decoder, latent


def in_float32(decoder: Any, latent: Tensor) -> Tensor:
    return host_picture(copy.deepcopy(decoder).float(), latent.float())


def shown(picture: Tensor) -> Tensor:
    """As a host turns it into a picture: 0 to 1."""
    return (picture.float() / 2 + 0.5).clamp(0, 1)


def relative_error(picture: Tensor, expected: Tensor) -> float:
    return float((picture.float() - expected).norm() / expected.norm())


def parameters_of(decoder: Any) -> list[Any]:
    return [(p.data_ptr(), p.dtype, p.stride(), p._version, p.detach().clone()) for p in decoder.parameters()]


def untouched(decoder: Any, before: list[Any]) -> bool:
    after = parameters_of(decoder)
    return all(a[:4] == b[:4] and torch.equal(a[4], b[4]) for a, b in zip(after, before, strict=True))


def count_decodes(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The type of every decode of ours."""
    types: list[torch.dtype] = []
    run = Decoding.run

    def counted(self: Decoding, layout: Any, latent: Tensor) -> Tensor:
        types.append(latent.dtype)
        return run(self, layout, latent)

    monkeypatch.setattr(Decoding, "run", counted)
    return types

"""Hooks on VAE decoders, of diffusers and of ldm: put on, called by other extensions' forwards, and taken off again."""
from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import diffusers_unet, relative_error
from torch import Tensor
from vae_builders import a_latent, decodes_by_route, diffusers_vae, last_decode, ldm_decoder, ldm_module

import lib_onediff
from lib_onediff.hosts.a1111.adapter import VAE_TRAITS
from lib_onediff.hosts.hooks import OTHER_VAE, VaeHooks
from lib_onediff.runtime.runtime import runtime

pytestmark = pytest.mark.usefixtures("fresh_route")


def state(module: Any) -> list[tuple[int, int, tuple[int, ...], int]]:
    return [(id(p), p.data_ptr(), p.stride(), p._version) for p in module.parameters()]


def pipe() -> Any:
    return SimpleNamespace(unet=diffusers_unet(), vae=diffusers_vae())


@torch.no_grad()
def decoded(vae: Any, latent: Tensor) -> Tensor:
    return vae.decode(latent).sample


# --- diffusers ----------------------------------------------------------------------------------------------------


def test_after_compile_pipe_onediff_decodes_and_uncompile_pipe_restores_the_vae() -> None:
    """After a second compile_pipe, OneDiff still decodes a latent once. Restored are the decoder's attributes, and the
    parameters with their memory and edit counts (_version)."""
    given = pipe()
    latent = a_latent(given.vae.decoder, 5, 7)
    expected, before = decoded(given.vae, latent), state(given.vae)
    attributes = set(given.vae.decoder.__dict__)
    for _ in range(2):
        lib_onediff.compile_pipe(given)
        assert relative_error(decoded(given.vae, latent), expected) < 1e-5
    assert last_decode() == ("ours", "") and decodes_by_route() == {"ours": 2, "host": 0}
    lib_onediff.uncompile_pipe(given)
    assert torch.equal(decoded(given.vae, latent), expected)
    assert decodes_by_route() == {"ours": 2, "host": 0}
    assert state(given.vae) == before and set(given.vae.decoder.__dict__) == attributes


# --- ldm (A1111, Forge) -------------------------------------------------------------------------------------------


@pytest.fixture
def decoder(fresh_route: Any) -> Any:
    return ldm_decoder()


@pytest.fixture
def patches(decoder: Any) -> Iterator[VaeHooks]:
    made = VaeHooks([ldm_module().Decoder], VAE_TRAITS)
    made.serve()
    yield made
    made.stop()


@torch.no_grad()
def called(decoder: Any, latent: Tensor) -> Tensor:
    return decoder(latent)


def test_onediff_decodes_the_tiles_of_an_extension_that_has_replaced_the_decoders_forward(
    decoder: Any, patches: VaeHooks
) -> None:
    """The extension sets a forward on the decoder object, which calls the previous forward for each tile: OneDiff's.
    The image is compared with that of ldm's own forward, tiled as well."""
    original, latent = decoder.forward, a_latent(decoder, 4, 8)

    def tiles(z: Tensor) -> Tensor:
        return torch.cat([original(part) for part in z.split(4, dim=3)], dim=3)

    decoder.forward = tiles
    tiled = called(decoder, latent)
    assert decodes_by_route() == {"ours": 2, "host": 0}
    patches.stop()
    assert relative_error(tiled, called(decoder, latent)) < 1e-5
    assert decodes_by_route() == {"ours": 2, "host": 0}


def test_when_a_vae_of_an_unsupported_kind_is_loaded_the_status_says_so(decoder: Any, patches: VaeHooks) -> None:
    """The status must not be that of the VAE before."""
    called(decoder, a_latent(decoder, 4, 4))
    patches.begin_run(torch.nn.Identity())
    assert last_decode() == ("host", OTHER_VAE) and decodes_by_route() == {"ours": 1, "host": 0}


def test_a_size_is_verified_once_although_ldm_writes_each_size_to_an_attribute_of_the_decoder(
    decoder: Any, patches: VaeHooks
) -> None:
    """ldm's decoder keeps the shape of its last latent (last_z_shape), which must not count as an edit. The host is
    timed once at each size, by the verification."""
    for width in (4, 8, 4, 8):
        called(decoder, a_latent(decoder, 4, width))
    assert decodes_by_route() == {"ours": 4, "host": 0} and decoder.last_z_shape[3] == 8
    hosts = [entry.host for entry in runtime.table.entries()]
    assert [(host.median_ms is not None, host.settled_ms is not None) for host in hosts] == [(True, False)] * 2

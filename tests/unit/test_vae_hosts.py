"""Our decoder in diffusers and in the hosts with ldm's VAE: put on, at work beneath others, and taken off again."""
from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import diffusers_unet, relative_error
from test_public_api_hooks import add_as_accelerate, remove_as_accelerate
from torch import Tensor
from vae_builders import a_latent, decodes, diffusers_vae, host_picture, last, ldm_decoder, ldm_module

import lib_onediff
from lib_onediff.hosts.diffusers import vae as diffusers_decoder
from lib_onediff.hosts.hooks import VaeHooks
from lib_onediff.weights.scan import HostTraits

pytestmark = pytest.mark.usefixtures("fresh_route")


def state(module: Any) -> list[tuple[int, int, tuple[int, ...], int]]:
    return [(id(p), p.data_ptr(), p.stride(), p._version) for p in module.parameters()]


def pipe() -> Any:
    return SimpleNamespace(unet=diffusers_unet(), vae=diffusers_vae())


@torch.no_grad()
def decoded(vae: Any, latent: Tensor) -> Tensor:
    return vae.decode(latent).sample


# --- diffusers ----------------------------------------------------------------------------------------------------


def test_compile_pipe_covers_the_vae_and_undoing_it_leaves_nothing() -> None:
    given = pipe()
    latent = a_latent(given.vae.decoder, 5, 7)
    expected, before = decoded(given.vae, latent), state(given.vae)
    attributes = set(given.vae.decoder.__dict__)
    for _ in range(2):
        lib_onediff.compile_pipe(given)
        assert relative_error(decoded(given.vae, latent), expected) < 1e-5
    assert last() == ("ours", "") and decodes() == {"ours": 2, "host": 0}
    lib_onediff.uncompile_pipe(given)
    assert torch.equal(decoded(given.vae, latent), expected)
    assert decodes() == {"ours": 2, "host": 0}
    assert state(given.vae) == before and set(given.vae.decoder.__dict__) == attributes


def test_somebody_elses_forward_stays(caplog: pytest.LogCaptureFixture) -> None:
    given = pipe()
    decoder = given.vae.decoder
    decoder.forward = theirs = lambda sample, latent_embeds=None: 2 * type(decoder).forward(decoder, sample)
    with pytest.raises(ValueError, match="somebody else has replaced"):
        diffusers_decoder.attach(decoder)
    lib_onediff.compile_pipe(given)
    assert decoder.__dict__["forward"] is theirs
    assert "somebody else has replaced" in caplog.text
    lib_onediff.uncompile_pipe(given)
    assert decoder.__dict__["forward"] is theirs


class Doubling:
    """A hook that can be seen, with the methods of accelerate's ModelHook."""

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> tuple:
        return args, kwargs

    def post_forward(self, module: Any, output: Tensor) -> Tensor:
        return 2 * output


@pytest.mark.parametrize("attached_first", [True, False])
def test_beneath_an_offloading_hook_of_accelerate(attached_first: bool) -> None:
    vae = diffusers_vae()
    latent = a_latent(vae.decoder)
    expected = decoded(vae, latent)
    if attached_first:
        diffusers_decoder.attach(vae.decoder)
    add_as_accelerate(vae.decoder, Doubling())
    diffusers_decoder.attach(vae.decoder)
    assert relative_error(decoded(vae, latent), 2 * expected) < 1e-5
    assert last() == ("ours", "")
    diffusers_decoder.detach(vae.decoder)
    assert torch.equal(decoded(vae, latent), 2 * expected)
    remove_as_accelerate(vae.decoder)
    assert torch.equal(decoded(vae, latent), expected) and decodes()["ours"] == 1


# --- ldm (A1111, Forge) -------------------------------------------------------------------------------------------


@pytest.fixture
def decoder(fresh_route: Any) -> Any:
    return ldm_decoder()


@pytest.fixture
def patches(decoder: Any) -> Iterator[VaeHooks]:
    made = VaeHooks([ldm_module().Decoder], HostTraits())
    made.serve()
    yield made
    made.stop()


@torch.no_grad()
def called(decoder: Any, latent: Tensor, **others: Any) -> Tensor:
    return decoder(latent, **others)


def test_a_class_patch_serves_every_decoder_and_leaves_nothing(decoder: Any) -> None:
    own = ldm_module().Decoder.__dict__["forward"]
    latent = a_latent(decoder, 5, 7)
    expected, before, attributes = called(decoder, latent), state(decoder), set(decoder.__dict__)
    encoder = ldm_decoder(kind="Encoder")
    picture = a_latent(encoder, 16, 24)
    encoded = host_picture(encoder, picture)
    patches = VaeHooks([ldm_module().Decoder, ldm_module().Encoder], HostTraits())
    for _ in range(2):
        patches.serve()
    assert relative_error(called(decoder, latent), expected) < 1e-5
    another = ldm_decoder(1)
    with torch.no_grad():
        assert relative_error(another(latent), own(another, latent)) < 1e-5
        assert relative_error(encoder(picture), encoded) < 1e-5
    assert decodes() == {"ours": 2, "host": 0}, "an encode is told, and not counted among the decodes"
    for _ in range(2):
        patches.stop()
    assert ldm_module().Decoder.__dict__["forward"] is own
    assert torch.equal(called(decoder, latent), expected)
    assert decodes() == {"ours": 2, "host": 0}
    assert state(decoder) == before and set(decoder.__dict__) == attributes


def test_an_extension_that_decodes_in_tiles_stands_above(decoder: Any, patches: VaeHooks) -> None:
    """It sets forward on the instance, keeps what it found there, and calls that where a picture is small."""
    original, latent = decoder.forward, a_latent(decoder, 4, 8)

    def tiles(z: Tensor) -> Tensor:
        return torch.cat([original(part) for part in z.split(4, dim=3)], dim=3)

    decoder.forward = tiles
    tiled = called(decoder, latent)
    assert decodes() == {"ours": 2, "host": 0}
    patches.stop()
    assert relative_error(tiled, called(decoder, latent)) < 1e-5
    assert decodes() == {"ours": 2, "host": 0}

"""Our decoder makes the host's picture, from ldm's and from diffusers' own modules."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import relative_error
from torch import nn
from vae_builders import LAYOUTS, LDM_LAYOUTS, SD, a_latent, diffusers_vae, host_picture, last, ldm_decoder, our_picture

from lib_onediff.core.leaves import Convolution
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.families.registry import read_decoder
from lib_onediff.families.vae.forward import Decoding
from lib_onediff.runtime.vae.bound import BoundDecoder
from lib_onediff.weights.scan import HostTraits

pytestmark = pytest.mark.usefixtures("fresh_route")
SIZES = [(6, 6), (1, 1), (5, 7), (9, 4)]
ROUNDING = {torch.float16: 1e-2, torch.bfloat16: 6e-2}


@pytest.mark.parametrize("name", LDM_LAYOUTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_ldm(name: str, size: tuple[int, int]) -> None:
    decoder = ldm_decoder(**LDM_LAYOUTS[name])
    latent = a_latent(decoder, *size, batch=2)
    assert relative_error(our_picture(decoder, latent), host_picture(decoder, latent)) < 1e-5
    assert last() == ("ours", "")


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_diffusers(name: str, size: tuple[int, int]) -> None:
    decoder = diffusers_vae(**LAYOUTS[name]).decoder
    latent = a_latent(decoder, *size, batch=2)
    assert relative_error(our_picture(decoder, latent), host_picture(decoder, latent)) < 1e-5
    assert last() == ("ours", "")


@pytest.mark.parametrize("make", [ldm_decoder, lambda: diffusers_vae(**SD).decoder], ids=["ldm", "diffusers"])
def test_folded_biases_make_the_same_picture(make: Any) -> None:
    """As the native operators get them, here with PyTorch's."""
    decoder = make()
    latent = a_latent(decoder, 5, 7, batch=2)
    bound = BoundDecoder(decoder, None, HostTraits())
    bound.look()
    with torch.no_grad():
        folded = Decoding(bound.weights(), torch_ops, False, fold_biases=True).run(bound.layout, latent)
    assert relative_error(folded, host_picture(decoder, latent)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_as_near_to_float32_as_the_hosts(dtype: torch.dtype) -> None:
    decoder = diffusers_vae(**SD).decoder.to(dtype)
    latent = a_latent(decoder, batch=2)
    ours, host = our_picture(decoder, latent), host_picture(decoder, latent)
    assert last() == ("ours", "")
    assert ours.dtype == dtype
    exact = host_picture(decoder.float(), latent.float()).to(torch.float64)
    error, host_error = (relative_error(picture.double(), exact) for picture in (ours, host))
    assert error < max(1.1 * host_error, ROUNDING[dtype] / 10), (error, host_error)


def test_float64_is_left_to_the_host() -> None:
    decoder = diffusers_vae().decoder.double()
    latent = a_latent(decoder)
    assert torch.equal(our_picture(decoder, latent), host_picture(decoder, latent))
    route, reason = last()
    assert route == "host" and "float64" in reason


@pytest.mark.parametrize("circular", [False, True])
def test_tiling_of_a1111(circular: bool) -> None:
    """It sets the padding of every convolution, also of 1x1, between two decodes."""
    decoder = ldm_decoder()
    latent = a_latent(decoder, 5, 7)
    plain = our_picture(decoder, latent)
    for module in decoder.modules():
        if isinstance(module, nn.Conv2d):
            module.padding_mode = "circular" if circular else "zeros"
    tiled = our_picture(decoder, latent)
    assert relative_error(tiled, host_picture(decoder, latent)) < 1e-5
    assert last() == ("ours", "")
    assert (relative_error(tiled, plain) > 1e-2) == circular
    convolutions = [leaf for leaf in read_decoder(decoder).leaves() if isinstance(leaf, Convolution)]
    assert {leaf.circular for leaf in convolutions} == {circular}


@pytest.mark.parametrize("given", [{}, {"tile_latent_min_size": 4, "tile_sample_min_size": 8}], ids=["whole", "tiles"])
def test_diffusers_tiling_and_slicing_stay_the_hosts(given: dict[str, Any]) -> None:
    from lib_onediff.hosts.diffusers import vae as diffusers_decoder

    vae = diffusers_vae()
    latent = a_latent(vae.decoder, 11, 9, batch=3)
    vae.enable_slicing()
    if given:
        vae.enable_tiling()
        for name, value in given.items():
            setattr(vae, name, value)
    with torch.no_grad():
        expected = vae.decode(latent).sample
        diffusers_decoder.attach(vae.decoder)
        ours = vae.decode(latent).sample
    assert relative_error(ours, expected) < 1e-5
    assert last()[0] == "ours"


def test_upcast_attention_is_computed_and_another_shape() -> None:
    decoder = ldm_decoder().to(torch.float16)
    latent = a_latent(decoder)
    for upcast in (True, False):
        picture = our_picture(decoder, latent, upcast_attention=upcast)
        assert relative_error(picture, host_picture(decoder, latent)) < 1e-2
        assert last() == ("ours", "")


def test_architecture_is_the_same_in_every_host_and_for_all_weights() -> None:
    layouts = [read_decoder(decoder) for decoder in (
        ldm_decoder(), ldm_decoder(1), diffusers_vae(**{**SD, "block_out_channels": (32, 64, 128, 128)}).decoder,
        ldm_decoder(z_channels=16),
        ldm_decoder(attn_type="none"),
    )]
    ldm, other_weights, diffusers, flux, plain = (layout.architecture for layout in layouts)
    assert ldm == other_weights
    assert len({ldm, flux, plain}) == 3
    # ldm's epsilon is written 1e-6 as diffusers', and the layers are the same.
    assert ldm == diffusers


@pytest.mark.parametrize("make", [ldm_decoder, lambda: diffusers_vae().decoder], ids=["ldm", "diffusers"])
def test_weights_that_change_in_place_or_are_replaced_count_at_once(make: Any) -> None:
    decoder, other = make(), make()
    for parameter in other.parameters():
        parameter.data.mul_(1.1)
    latent = a_latent(decoder)
    our_picture(decoder, latent)
    decoder.load_state_dict(other.state_dict())
    assert relative_error(our_picture(decoder, latent), host_picture(other, latent)) < 1e-5
    decoder.conv_in.weight = nn.Parameter(decoder.conv_in.weight.detach() * 2)
    decoder.conv_out = nn.Conv2d(decoder.conv_out.in_channels, 3, 3, padding=1)
    assert relative_error(our_picture(decoder, latent), host_picture(decoder, latent)) < 1e-5
    assert last() == ("ours", "")


def test_parameters_are_never_touched() -> None:
    decoder = diffusers_vae(**SD).decoder
    decoder.conv_in.to(memory_format=torch.channels_last)
    state = lambda: [  # noqa: E731
        (id(parameter), parameter.data_ptr(), parameter.stride(), parameter._version)
        for parameter in decoder.parameters()
    ]
    before = state()
    our_picture(decoder, a_latent(decoder))
    assert last() == ("ours", "")
    assert state() == before

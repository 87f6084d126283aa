"""Our decoder makes the host's picture, from ldm's and from diffusers' own modules."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from builders import relative_error
from grid import grid
from torch import nn
from vae_builders import LAYOUTS, LDM_LAYOUTS, SD, a_latent, diffusers_vae, host_picture, last, ldm_decoder, our_picture

from lib_onediff.model.layout import Convolution
from lib_onediff.model.patches import HostTraits
from lib_onediff.model.read import read_decoder
from lib_onediff.model.vae.forward import Decoding
from lib_onediff.ops import torch_ops
from lib_onediff.runtime.vae.bound import BoundDecoder

pytestmark = pytest.mark.usefixtures("fresh_route")
ROUNDING = {torch.float16: 1e-2, torch.bfloat16: 6e-2}


DECODERS: dict[str, Callable[[], Any]] = {
    **{f"ldm {name}": partial(ldm_decoder, **layout) for name, layout in LDM_LAYOUTS.items()},
    **{name: partial(diffusers_vae, **layout) for name, layout in LAYOUTS.items()},
}


@grid(name=list(DECODERS), size=[(6, 6), (1, 1), (5, 7), (9, 4)])
def test_ours_is_the_hosts(name: str, size: tuple[int, int]) -> None:
    """Also with the biases folded, as the native operators get them."""
    made = DECODERS[name]()
    decoder = getattr(made, "decoder", made)
    latent = a_latent(decoder, *size, batch=2)
    expected = host_picture(decoder, latent)
    assert relative_error(our_picture(decoder, latent), expected) < 1e-5 and last() == ("ours", "")
    bound = BoundDecoder(decoder, None, HostTraits())
    bound.look()
    with torch.no_grad():
        folded = Decoding(bound.weights(), torch_ops, False, fold_biases=True).run(bound.layout, latent)
    assert relative_error(folded, expected) < 1e-5


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

"""The output of our VAE decoder and encoder against that of ldm's and diffusers' own, in the VAE's dtype."""
from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from builders import relative_error
from grid import WHOLE, grid
from torch import nn
from vae_builders import (
    LAYOUTS,
    LDM_LAYOUTS,
    SD,
    a_latent,
    decodes_by_route,
    diffusers_vae,
    host_picture,
    in_float32,
    last_decode,
    ldm_decoder,
    overflowing_in_float16,
    routed_picture,
)

from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.families.registry import DECODERS
from lib_onediff.families.vae import Decoding
from lib_onediff.weights.bound import BoundNetwork

pytestmark = pytest.mark.usefixtures("fresh_route")
PARTS = ["decoder", "encoder"]
EVERY_LAYOUT = {
    **LAYOUTS,
    "attention on the way down": {**SD, "down_block_types": ("DownEncoderBlock2D", "AttnDownEncoderBlock2D") * 2},
}
LDM = "ldm "
SIZES = {"decoder": [(6, 6), (1, 1), (5, 7), (9, 4)], "encoder": [(16, 16), (24, 40), (17, 22), (16, 24)]}


def half_of(name: str, part: str) -> Any:
    if name.startswith(LDM):
        return ldm_decoder(kind=part.capitalize(), **LDM_LAYOUTS[name.removeprefix(LDM)])
    return getattr(diffusers_vae(**EVERY_LAYOUT[name]), part)


def computed(half: Any, given: torch.Tensor, operators: Any = torch_ops, fold_biases: bool = False) -> torch.Tensor:
    """The output of our forward, called directly."""
    bound = BoundNetwork(half, DECODERS.read)
    bound.refresh_without_binding()
    binding = bound.binding
    with torch.no_grad():
        return Decoding(binding.weights(), operators, False, fold_biases=fold_biases).run(binding.layout, given)


@grid(half=list(product(PARTS, [*EVERY_LAYOUT, *(LDM + name for name in LDM_LAYOUTS)])), size=range(4))
def test_our_vae_output_is_close_to_the_host_output_for_every_layout_and_size(half: tuple[str, str], size: int) -> None:
    """half: decoder or encoder, and its layout. size: an index in SIZES. The native operators set fold_biases, with
    which the next norm adds a convolution's bias; here, torch's operators are also tested with it."""
    part, name = half
    module = half_of(name, part)
    given = a_latent(module, *SIZES[part][size], batch=2)
    expected = host_picture(module, given)
    assert relative_error(routed_picture(module, given), expected) < 1e-5 and last_decode() == ("ours", "")
    assert relative_error(computed(module, given, fold_biases=True), expected) < 1e-5


@grid(part=PARTS, dtype=[torch.float32, torch.float16])
def test_the_vae_output_by_our_kernels_is_close_to_the_host_output(part: str, dtype: torch.dtype) -> None:
    """The host computes in the same dtype. On a CPU, Triton's interpreter runs the kernels, so that VAE and image are
    tiny."""
    pytest.importorskip("triton", reason="needs Triton")
    from lib_onediff.devices.cuda.kernels.operators import NativeOperators

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = half_of("SD" if WHOLE else "one layer", part).to(device, dtype)
    sizes = {"encoder": (40, 24), "decoder": (5, 3)} if WHOLE else {"encoder": (12, 8), "decoder": (3, 2)}
    given = a_latent(module, *sizes[part])
    ours = computed(module, given, NativeOperators(), fold_biases=True)
    assert relative_error(ours, host_picture(module, given)) < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_in_half_precision_the_error_of_our_decoder_is_at_most_1_1_times_that_of_the_host(dtype: torch.dtype) -> None:
    """Both errors are relative to the host's decoder with the same weights in float32."""
    decoder = half_of("SD", "decoder").to(dtype)
    latent = a_latent(decoder, batch=2)
    ours = routed_picture(decoder, latent)
    host = host_picture(decoder, latent)
    assert last_decode() == ("ours", "")
    assert ours.dtype == dtype
    exact = host_picture(decoder.float(), latent.float()).to(torch.float64)
    error, host_error = (relative_error(picture.double(), exact) for picture in (ours, host))
    assert error < 1.1 * host_error, (error, host_error)


@pytest.mark.parametrize("part", PARTS)
def test_switching_the_tiling_of_a1111_on_and_off_takes_effect_at_the_next_decode(part: str) -> None:
    """For tileable images, A1111 sets the padding mode of all convolutions, including those of 1x1, to circular between
    two decodes. part: encoders are tested as well."""
    module = half_of("ldm SD", part)
    given = a_latent(module, *SIZES[part][2])
    plain = routed_picture(module, given)
    for mode in ("circular", "zeros"):
        for layer in module.modules():
            if isinstance(layer, nn.Conv2d):
                layer.padding_mode = mode
        tiled = routed_picture(module, given)
        assert relative_error(tiled, host_picture(module, given)) < 1e-5
        assert last_decode() == ("ours", "")
        assert (relative_error(tiled, plain) > 1e-2) == (mode == "circular")


def test_diffusers_tiling_and_slicing_call_our_decoder_for_each_tile() -> None:
    """diffusers' tiled and sliced decode passes each tile of each image to the decoder. The whole image must be close
    to that of diffusers with its own decoder, and no tile may be decoded by the latter."""
    from lib_onediff.hosts.diffusers import vae as diffusers_decoder

    vae = diffusers_vae()
    latent = a_latent(vae.decoder, 11, 9, batch=3)
    vae.enable_slicing()
    vae.enable_tiling()
    vae.tile_latent_min_size = 4
    vae.tile_sample_min_size = 8
    with torch.no_grad():
        expected = vae.decode(latent).sample
        diffusers_decoder.attach(vae.decoder)
        ours = vae.decode(latent).sample
    assert relative_error(ours, expected) < 1e-5
    routes = decodes_by_route()
    assert routes["host"] == 0 and routes["ours"] > len(latent), "each tile of each image is a decode"


@pytest.mark.parametrize("name", ["ldm SD", "one layer"])
def test_vae_weights_edited_in_place_or_replaced_take_effect_at_the_next_decode(name: str) -> None:
    """All weights are edited in place by load_state_dict(); then one parameter and one whole layer are replaced. The
    reference is the host's decoder with these weights. name: the VAE's layout."""
    decoder = half_of(name, "decoder")
    other = half_of(name, "decoder")
    for parameter in other.parameters():
        parameter.data.mul_(1.1)
    latent = a_latent(decoder)
    routed_picture(decoder, latent)
    decoder.load_state_dict(other.state_dict())
    assert relative_error(routed_picture(decoder, latent), host_picture(other, latent)) < 1e-5
    decoder.conv_in.weight = nn.Parameter(decoder.conv_in.weight.detach() * 2)
    decoder.conv_out = nn.Conv2d(decoder.conv_out.in_channels, 3, 3, padding=1)
    assert relative_error(routed_picture(decoder, latent), host_picture(decoder, latent)) < 1e-5
    assert last_decode() == ("ours", "")


def test_an_encoder_that_overflows_in_float16_encodes_again_and_later_at_once_in_float32() -> None:
    """The first image is encoded in float16 and then in float32; the second one only in float32. The latents, in
    float16, must be close to those of the host's encoder in float32."""
    encoder, picture = overflowing_in_float16(lambda: half_of("SD", "encoder"))
    expected = in_float32(encoder, picture)
    for reason in ("encoded again in float32", "encoded in float32"):
        latent = routed_picture(encoder, picture)
        assert last_decode() == ("ours", f"{reason}, because this VAE overflows in float16")
        assert latent.dtype == torch.float16 and relative_error(latent.float(), expected) < 1e-3

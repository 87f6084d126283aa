"""Our encoder makes what a latent is drawn from as the host's does, in the type of choice, and never NaN in silence."""
from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from builders import randomise, relative_error, without_initial_values
from grid import WHOLE, grid
from torch import Tensor, nn
from vae_builders import (
    GROUPS,
    LAYOUTS,
    LDM,
    LDM_LAYOUTS,
    SD,
    decodes,
    diffusers_vae,
    host_picture,
    last,
    ldm_module,
    our_picture,
    with_small_groups,
)

from lib_onediff.hosts.ldm_decoder import DecoderPatches
from lib_onediff.model.layout import UnsupportedUNet
from lib_onediff.model.patches import HostTraits
from lib_onediff.model.read import read_decoder
from lib_onediff.model.vae.forward import Decoding
from lib_onediff.ops import torch_ops
from lib_onediff.runtime.runtime import runtime
from lib_onediff.runtime.vae.bound import BoundDecoder
from lib_onediff.runtime.vae.overflow import WatchedOperators

pytestmark = pytest.mark.usefixtures("fresh_route")
LIMIT = torch.finfo(torch.float16).max


def ldm_encoder(**config: Any) -> Any:
    module = pytest.importorskip("ldm.modules.diffusionmodules.model")
    with without_initial_values():
        encoder = module.Encoder(**{**LDM, **copy.deepcopy(config)})
    return with_small_groups(encoder)


def a_picture(encoder: Any, height: int = 16, width: int = 24, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.rand((batch, 3, height, width), generator=generator) - 1).to(encoder.conv_in.weight)


ATTENTION_ON_THE_WAY_DOWN = {**SD, "down_block_types": ("DownEncoderBlock2D", "AttnDownEncoderBlock2D") * 2}
ENCODERS: dict[str, Callable[[], Any]] = {
    **{f"ldm {name}": partial(ldm_encoder, **layout) for name, layout in LDM_LAYOUTS.items()},
    **{name: partial(diffusers_vae, **layout) for name, layout in LAYOUTS.items()},
    "attention on the way down": partial(diffusers_vae, **ATTENTION_ON_THE_WAY_DOWN),
}


@grid(name=list(ENCODERS), size=[(16, 16), (24, 40), (17, 22)])
def test_ours_is_the_hosts(name: str, size: tuple[int, int]) -> None:
    """Also with the biases folded, as the native operators get them."""
    made = ENCODERS[name]()
    encoder = getattr(made, "encoder", made)
    picture = a_picture(encoder, *size, batch=2)
    expected = host_picture(encoder, picture)
    assert relative_error(our_picture(encoder, picture), expected) < 1e-5 and last() == ("ours", "")
    (entry,) = runtime.table.entries()
    assert (entry.key.resolution, entry.model) == (f"{size[1]}x{size[0]}", "VAE encoder")
    bound = BoundDecoder(encoder, None, HostTraits())
    bound.look()
    with torch.no_grad():
        folded = Decoding(bound.weights(), torch_ops, False, fold_biases=True).run(bound.layout, picture)
    assert relative_error(folded, expected) < 1e-5


def test_an_encoder_that_overflows() -> None:
    encoder = diffusers_vae(**SD).encoder.half()
    picture = a_picture(encoder)
    wide = copy.deepcopy(encoder).float()
    bound = BoundDecoder(wide, None, HostTraits())
    bound.look()
    watched = WatchedOperators(torch_ops)
    with torch.no_grad():
        Decoding(bound.weights(), watched, False, fold_biases=False).run(bound.layout, picture.float())
        encoder.conv_in.weight *= 4 * LIMIT / float(torch.stack(watched.peaks).max())
        wide = copy.deepcopy(encoder).float()
        expected = wide(picture.float())
    assert not host_picture(encoder, picture).isfinite().all()
    latent = our_picture(encoder, picture)
    assert last() == ("ours", "encoded again in float32, because this VAE overflows in float16")
    assert latent.dtype == torch.float16
    assert float((latent.float() - expected).norm() / expected.norm()) < 1e-3
    our_picture(encoder, picture)
    assert last() == ("ours", "encoded in float32, because this VAE overflows in float16")
    runtime.tuning_cache.clear()


@pytest.mark.parametrize(("choice", "dtype"), [
    ("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32), ("auto", torch.float16),
])
def test_a_type_of_choice(choice: str, dtype: torch.dtype) -> None:
    encoder = diffusers_vae(**SD).encoder.half()
    picture = a_picture(encoder)
    settings = copy.copy(runtime.settings)
    object.__setattr__(settings, "vae_precision", choice)
    runtime.configure(settings)
    our_picture(encoder, picture)
    (entry,) = runtime.table.entries()
    assert (entry.key.dtype, entry.key.latent_dtype, last()) == (dtype, torch.float16, ("ours", ""))


def test_a_plain_latent_is_no_black_picture() -> None:
    """What is of one colour as a picture may be a latent."""
    encoder = diffusers_vae(**SD).encoder
    with torch.no_grad():
        encoder.conv_out.weight.zero_()
    picture = a_picture(encoder)
    assert torch.allclose(our_picture(encoder, picture), host_picture(encoder, picture)) and last() == ("ours", "")


def test_a_class_level_patch_serves_encoders_too() -> None:
    encoder = ldm_encoder()
    picture = a_picture(encoder)
    expected = host_picture(encoder, picture)
    patches = DecoderPatches([ldm_module().Decoder, ldm_module().Encoder], HostTraits())
    patches.serve()
    try:
        with torch.no_grad():
            assert relative_error(encoder(picture), expected) < 1e-5
        assert runtime.vae.status()["route"] == "ours"
        assert decodes() == {"ours": 0, "host": 0}, "an encode is told, and not counted among the decodes"
    finally:
        patches.stop()
    with torch.no_grad():
        assert torch.equal(encoder(picture), expected)


@pytest.mark.parametrize("change", [
    lambda encoder: setattr(encoder.down[0].downsample, "with_conv", False),
    lambda encoder: setattr(encoder.down[0].downsample, "conv", nn.Conv2d(32, 32, 3, 2, 1)),
    lambda encoder: setattr(encoder.down[1], "block", encoder.down[1].block[:1]),
])
def test_what_we_do_not_know(change: Any) -> None:
    encoder = ldm_encoder()
    change(encoder)
    with pytest.raises(UnsupportedUNet) as refusal:
        read_decoder(encoder)
    assert "\n" not in str(refusal.value)


def test_other_encoders() -> None:
    from diffusers import AsymmetricAutoencoderKL, AutoencoderTiny, VQModel

    with pytest.raises(UnsupportedUNet):
        read_decoder(AutoencoderTiny().encoder)
    for kind in (VQModel, AsymmetricAutoencoderKL):
        names = {"VQModel": {"norm_num_groups": GROUPS, "block_out_channels": (8,)}}.get(
            kind.__name__, {"norm_num_groups": GROUPS, "down_block_out_channels": (8,), "up_block_out_channels": (8,)}
        )
        # Their encoders are an AutoencoderKL's.
        encoder = randomise(kind(**names).encoder)
        picture = a_picture(encoder)
        assert relative_error(our_picture(encoder, picture), host_picture(encoder, picture)) < 1e-5


@grid(part=["encoder", "decoder"], dtype=[torch.float32, torch.float16])
def test_the_kernels_themselves_watched(part: str, dtype: torch.dtype) -> None:
    """What is watched is what a norm that follows has measured on the way: the very same tensor."""
    pytest.importorskip("triton", reason="needs Triton")
    from lib_onediff.ops.triton.operators import TritonOperators

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = getattr(diffusers_vae(**SD), part).to(device, dtype)
    height, width = (40, 24) if WHOLE else (16, 8)
    given = torch.rand((1, 3, height, width) if part == "encoder" else (1, 4, height // 8, width // 8))
    given = given.to(device, dtype)
    bound = BoundDecoder(module, None, HostTraits())
    bound.look()
    made = {}
    for watched in (WatchedOperators(TritonOperators()), TritonOperators()):
        with torch.no_grad():
            made[type(watched)] = Decoding(bound.weights(), watched, False, fold_biases=True).run(bound.layout, given)
    first, second = made.values()
    assert torch.equal(first, second)
    assert relative_error(first, host_picture(module, given)) < (1e-5 if dtype == torch.float32 else 1e-2)

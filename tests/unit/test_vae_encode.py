"""Our encoder makes what a latent is drawn from as the host's does, in the type of choice, and never NaN in silence."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from backend_names import NATIVE
from builders import randomise, relative_error, without_initial_values
from grid import WHOLE, grid
from ladder_builders import pretend_a_gpu
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

from lib_onediff.core.leaves import Convolution
from lib_onediff.core.refusal import Refusal
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.families.registry import read_decoder
from lib_onediff.families.vae.forward import Decoding
from lib_onediff.hosts.hooks import VaeHooks
from lib_onediff.runtime.runtime import runtime
from lib_onediff.runtime.vae.bound import BoundDecoder
from lib_onediff.runtime.vae.precision import WatchedOperators
from lib_onediff.weights.scan import HostTraits

pytestmark = pytest.mark.usefixtures("fresh_route")
SIZES = [(16, 16), (24, 40), (17, 22)]
LIMIT = torch.finfo(torch.float16).max


def ldm_encoder(**config: Any) -> Any:
    module = pytest.importorskip("ldm.modules.diffusionmodules.model")
    with without_initial_values():
        encoder = module.Encoder(**{**LDM, **copy.deepcopy(config)})
    return with_small_groups(encoder)


def a_picture(encoder: Any, height: int = 16, width: int = 24, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.rand((batch, 3, height, width), generator=generator) - 1).to(encoder.conv_in.weight)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", LDM_LAYOUTS)
def test_ldm(name: str, size: tuple[int, int]) -> None:
    encoder = ldm_encoder(**LDM_LAYOUTS[name])
    picture = a_picture(encoder, *size, batch=2)
    assert relative_error(our_picture(encoder, picture), host_picture(encoder, picture)) < 1e-5
    assert last() == ("ours", "")


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_diffusers(name: str, size: tuple[int, int]) -> None:
    encoder = diffusers_vae(**LAYOUTS[name]).encoder
    picture = a_picture(encoder, *size, batch=2)
    assert relative_error(our_picture(encoder, picture), host_picture(encoder, picture)) < 1e-5
    assert last() == ("ours", "")


def test_diffusers_with_attention_on_the_way_down() -> None:
    encoder = diffusers_vae(**{**SD, "down_block_types": ("DownEncoderBlock2D", "AttnDownEncoderBlock2D") * 2}).encoder
    picture = a_picture(encoder)
    assert relative_error(our_picture(encoder, picture), host_picture(encoder, picture)) < 1e-5
    assert last() == ("ours", "")


def test_tiling_goes_round_where_the_hosts_does() -> None:
    encoder = ldm_encoder()
    for module in encoder.modules():
        if isinstance(module, nn.Conv2d):
            module.padding_mode = "circular"
            module._reversed_padding_repeated_twice = [side for side in reversed(module.padding) for _ in range(2)]
    picture = a_picture(encoder)
    assert relative_error(our_picture(encoder, picture), host_picture(encoder, picture)) < 1e-5
    assert last() == ("ours", "")


@pytest.mark.parametrize("make", [ldm_encoder, lambda: diffusers_vae(**SD).encoder], ids=["ldm", "diffusers"])
def test_folded_biases_make_the_same(make: Any) -> None:
    encoder = make()
    picture = a_picture(encoder)
    bound = BoundDecoder(encoder, None, HostTraits())
    bound.look()
    with torch.no_grad():
        folded = Decoding(bound.weights(), torch_ops, False, fold_biases=True).run(bound.layout, picture)
    assert relative_error(folded, host_picture(encoder, picture)) < 1e-5


def test_its_entry_has_the_pictures_size() -> None:
    encoder = diffusers_vae(**SD).encoder
    our_picture(encoder, a_picture(encoder, 32, 48))
    (entry,) = runtime.table.entries()
    assert (entry.key.resolution, entry.model, entry.key.is_decode) == ("48x32", "VAE encoder", True)
    layout = read_decoder(encoder)
    assert (layout.encodes, layout.reduction) == (True, 8)
    decoder = read_decoder(diffusers_vae(**SD).decoder)
    assert (decoder.encodes, decoder.reduction, decoder.model_name) == (False, 1, "VAE decoder")


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


def test_native_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_gpu(monkeypatch, torch_ops)
    encoder = diffusers_vae(**SD).encoder
    picture = a_picture(encoder)
    assert relative_error(our_picture(encoder, picture), host_picture(encoder, picture)) < 1e-5
    assert runtime.table.entries()[0].key.backend == NATIVE and last() == ("ours", "")


def test_a_class_level_patch_serves_encoders_too() -> None:
    encoder = ldm_encoder()
    picture = a_picture(encoder)
    expected = host_picture(encoder, picture)
    patches = VaeHooks([ldm_module().Decoder, ldm_module().Encoder], HostTraits())
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
    with pytest.raises(Refusal) as refusal:
        read_decoder(encoder)
    assert "\n" not in str(refusal.value)


def test_other_encoders() -> None:
    from diffusers import AsymmetricAutoencoderKL, AutoencoderTiny, VQModel

    with pytest.raises(Refusal):
        read_decoder(AutoencoderTiny().encoder)
    for kind in (VQModel, AsymmetricAutoencoderKL):
        names = {"VQModel": {"norm_num_groups": GROUPS, "block_out_channels": (8,)}}.get(
            kind.__name__, {"norm_num_groups": GROUPS, "down_block_out_channels": (8,), "up_block_out_channels": (8,)}
        )
        # Their encoders are an AutoencoderKL's.
        encoder = randomise(kind(**names).encoder)
        picture = a_picture(encoder)
        assert relative_error(our_picture(encoder, picture), host_picture(encoder, picture)) < 1e-5


def test_every_layer_is_described() -> None:
    for encoder in (diffusers_vae(**SD).encoder, ldm_encoder()):
        layout = read_decoder(encoder)
        held = {name.rpartition(".")[0] for name, _ in encoder.named_parameters()}
        assert {leaf.path for leaf in layout.leaves()} == held
        assert sum(isinstance(leaf, Convolution) and leaf.stride == 2 for leaf in layout.leaves()) == 3


@grid(part=["encoder", "decoder"], dtype=[torch.float32, torch.float16])
def test_the_kernels_themselves_watched(part: str, dtype: torch.dtype) -> None:
    """What is watched is what a norm that follows has measured on the way: the very same tensor."""
    pytest.importorskip("triton", reason="needs Triton")
    from lib_onediff.devices.cuda.kernels.operators import TritonOperators

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

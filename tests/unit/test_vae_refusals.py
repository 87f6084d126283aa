"""What we do not decode is refused with one line, and the host's own picture comes back bit for bit."""
from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vae_builders import a_latent, diffusers_vae, last, ldm_decoder, ldm_module, our_picture

from lib_onediff.core.refusal import Refusal
from lib_onediff.families.registry import read_decoder
from lib_onediff.weights.scan import HostTraits

pytestmark = pytest.mark.usefixtures("fresh_route")


class LoudConvolution(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class LoudProcessor:
    def __call__(self, attn: Any, hidden_states: Tensor, *others: Any, **more: Any) -> Tensor:
        return 2 * hidden_states


def hook(decoder: Any) -> None:
    decoder.conv_out.register_forward_hook(lambda module, given, output: 2 * output)


def pre_hook(decoder: Any) -> None:
    decoder.conv_out.register_forward_pre_hook(lambda module, given: (2 * given[0],))


def own_forward(decoder: Any) -> None:
    layer = decoder.conv_out
    layer.forward = lambda x: 2 * type(layer).forward(layer, x)


def own_class(decoder: Any) -> None:
    decoder.conv_out.__class__ = LoudConvolution


def extra_parameter(decoder: Any) -> None:
    decoder.conv_out.adapter = nn.Parameter(torch.zeros(1))


def dropout_at_work(decoder: Any) -> None:
    dropout = next(module for module in decoder.modules() if isinstance(module, nn.Dropout))
    dropout.p = 0.5
    dropout.train()


ANY_HOST: dict[str, tuple[Callable[[Any], None], str]] = {
    "a hook": (hook, "conv_out has a forward hook"),
    "a pre-hook": (pre_hook, "conv_out has a forward hook"),
    "a forward of its own": (own_forward, "conv_out has a forward of its own, set by test_vae_refusals"),
    "a class of its own": (own_class, "its forward is its own"),
    "another parameter": (extra_parameter, "1 parameters that we do not know, such as conv_out.adapter"),
}


def check_refused(decoder: Any, reason: str, **options: Any) -> None:
    latent = a_latent(decoder)
    torch.manual_seed(1)
    with torch.no_grad():
        expected = type(decoder).forward(decoder, latent)
    torch.manual_seed(1)
    assert torch.equal(our_picture(decoder, latent, **options), expected)
    route, given = last()
    assert route == "host" and re.search(reason, given), given
    assert "\n" not in given


@pytest.mark.parametrize("host", ["ldm", "diffusers"])
@pytest.mark.parametrize("name", ANY_HOST)
def test_whatever_the_host(host: str, name: str) -> None:
    change, reason = ANY_HOST[name]
    decoder = ldm_decoder() if host == "ldm" else diffusers_vae().decoder
    change(decoder)
    check_refused(decoder, reason)


def test_dropout() -> None:
    decoder = ldm_decoder(dropout=0.5)
    dropout_at_work(decoder)
    check_refused(decoder, "drops values")


@pytest.mark.parametrize(("switch", "reason"), [("tanh_out", "tanh"), ("give_pre_end", "give_pre_end")])
def test_switches_of_ldm_are_seen_at_once(switch: str, reason: str) -> None:
    decoder = ldm_decoder()
    latent = a_latent(decoder)
    our_picture(decoder, latent)
    assert last() == ("ours", "")
    setattr(decoder, switch, True)
    check_refused(decoder, reason)
    setattr(decoder, switch, False)
    our_picture(decoder, latent)
    assert last() == ("ours", "")


def test_ldm_with_a_3x3_shortcut() -> None:
    decoder = ldm_decoder()
    block = decoder.up[0].block[0]
    block.use_conv_shortcut = True
    block.conv_shortcut = nn.Conv2d(block.in_channels, block.out_channels, 3, padding=1)
    check_refused(decoder, "3x3 convolution in its shortcut")


def test_ldm_with_an_attention_that_we_do_not_know() -> None:
    decoder = ldm_decoder()
    decoder.mid.attn_1 = nn.Sequential(nn.Conv2d(128, 128, 1))
    check_refused(decoder, "mid.attn_1 is a .*Sequential, which we do not know")


def test_ldm_upsampling_without_a_convolution() -> None:
    check_refused(ldm_decoder(resamp_with_conv=False), "upsampling layer of another kind")


def test_class_patch_of_somebody_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = ldm_decoder()
    monkeypatch.setattr(ldm_module().AttnBlock, "forward", lambda self, x: 2 * x)
    check_refused(decoder, "AttnBlock.forward was replaced by test_vae_refusals")


def test_class_patch_of_somebody_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = ldm_decoder()
    original = ldm_module().AttnBlock.forward
    monkeypatch.setattr(ldm_module().AttnBlock, "forward", lambda self, x: original(self, x))
    our_picture(decoder, a_latent(decoder), HostTraits(trusted=(__name__,)))
    assert last() == ("ours", "")


def test_diffusers_attention_processor() -> None:
    vae = diffusers_vae()
    vae.decoder.mid_block.attentions[0].set_processor(LoudProcessor())
    check_refused(vae.decoder, "the attention processor LoudProcessor is set")


def other_vaes() -> dict[str, Callable[[], Any]]:
    from diffusers import (
        AsymmetricAutoencoderKL,
        AutoencoderKLTemporalDecoder,
        AutoencoderTiny,
        ConsistencyDecoderVAE,
        VQModel,
    )

    small = {"block_out_channels": (32, 64), "norm_num_groups": 4}
    return {
        "TAESD": lambda: AutoencoderTiny().decoder,
        "asymmetric": lambda: AsymmetricAutoencoderKL(
            down_block_out_channels=(8,), up_block_out_channels=(8,), norm_num_groups=4
        ).decoder,
        "temporal": lambda: AutoencoderKLTemporalDecoder(block_out_channels=(32,)).decoder,
        "consistency": lambda: ConsistencyDecoderVAE(
            encoder_block_out_channels=(32,), encoder_down_block_types=("DownEncoderBlock2D",),
            decoder_block_out_channels=(32,), decoder_down_block_types=("ResnetDownsampleBlock2D",),
            decoder_up_block_types=("ResnetUpsampleBlock2D",),
        ).decoder_unet,
        "spatial norms": lambda: VQModel(
            **small, norm_type="spatial", down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
        ).decoder,
    }


@pytest.mark.parametrize("name", ["TAESD", "asymmetric", "temporal", "consistency", "spatial norms"])
def test_other_autoencoders(name: str) -> None:
    with pytest.raises(Refusal) as refusal:
        read_decoder(other_vaes()[name]())
    assert "\n" not in str(refusal.value)


def test_parameters_of_several_types() -> None:
    """As SDXL's pipeline in diffusers leaves them when it upcasts a part of the VAE."""
    decoder = diffusers_vae().decoder
    decoder.up_blocks.to(torch.bfloat16)
    decoder.conv_norm_out.to(torch.bfloat16)
    decoder.conv_out.to(torch.bfloat16)
    check_refused(decoder, "its parameters are mixed: torch.float32")


def test_a_latent_of_another_type_or_shape() -> None:
    decoder = diffusers_vae().decoder
    with pytest.raises(RuntimeError):
        our_picture(decoder, a_latent(decoder).half())
    assert last() == ("host", "the VAE's weights are float32, the latent is float16")
    with pytest.raises(RuntimeError):
        our_picture(decoder, a_latent(decoder)[:, :3])
    assert last()[1] == "the latent is (1, 3, 6, 6), but this VAE takes 4 channels"


def test_autocast_to_another_type() -> None:
    decoder = diffusers_vae().decoder
    latent = a_latent(decoder)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = type(decoder).forward(decoder, latent)
        ours = our_picture(decoder, latent)
    assert torch.equal(ours, expected)
    assert last() == ("host", "autocast to bfloat16 is on, but the latent is float32")


def test_training() -> None:
    from lib_onediff.hosts.diffusers import vae as diffusers_decoder

    vae = diffusers_vae()
    diffusers_decoder.attach(vae.decoder)
    vae.decode(a_latent(vae.decoder)).sample.sum().backward()
    assert vae.decoder.conv_in.weight.grad.abs().sum() > 0
    assert last() == ("host", "gradients are being recorded (training?)")


def test_hook_on_all_modules() -> None:
    decoder = diffusers_vae().decoder
    handle = nn.modules.module.register_module_forward_hook(lambda module, given, output: None)
    try:
        check_refused(decoder, "a forward hook is set on all modules")
    finally:
        handle.remove()

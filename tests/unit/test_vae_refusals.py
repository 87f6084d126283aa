"""Decodes that our forward does not support: the status gives the reason in one line, and the image is that of the
host's own forward, bit for bit."""
from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from grid import name_of
from own_forward import own_forward
from torch import Tensor, nn
from vae_builders import a_latent, diffusers_vae, last_decode, ldm_decoder, ldm_module, routed_picture

from lib_onediff.core.refusal import Refusal
from lib_onediff.families.registry import DECODERS
from lib_onediff.weights.scan import HostTraits

pytestmark = pytest.mark.usefixtures("fresh_route")


class LoudProcessor:
    def __call__(self, attn: Any, hidden_states: Tensor, *others: Any, **more: Any) -> Tensor:
        return 2 * hidden_states


def hook(decoder: Any) -> None:
    decoder.conv_out.register_forward_hook(lambda module, given, output: 2 * output)


def extra_parameter(decoder: Any) -> None:
    decoder.conv_out.adapter = nn.Parameter(torch.zeros(1))


def dropout_at_work(decoder: Any) -> None:
    dropout = next(module for module in decoder.modules() if isinstance(module, nn.Dropout))
    dropout.p = 0.5
    dropout.train()


def assert_left_to_the_host(decoder: Any, reason: str) -> None:
    """Assert that a decode is the host's, to the bit, for a reason of one line that matches this pattern."""
    latent = a_latent(decoder)
    torch.manual_seed(1)
    with torch.no_grad():
        expected = own_forward(decoder)(latent)
    torch.manual_seed(1)
    assert torch.equal(routed_picture(decoder, latent), expected)
    route, given = last_decode()
    assert route == "host" and re.search(reason, given), given
    assert "\n" not in given


def three_by_three(decoder: Any) -> None:
    block = decoder.up[0].block[0]
    block.use_conv_shortcut = True
    block.conv_shortcut = nn.Conv2d(block.in_channels, block.out_channels, 3, padding=1)


def other_attention(decoder: Any) -> None:
    decoder.mid.attn_1 = nn.Sequential(nn.Conv2d(128, 128, 1))


def mixed(decoder: Any) -> None:
    decoder.to(torch.bfloat16).conv_norm_out.float()


def processor(decoder: Any) -> None:
    decoder.mid_block.attentions[0].set_processor(LoudProcessor())


def of_diffusers() -> Any:
    return diffusers_vae().decoder


# The lead of core.refusal.unsupported_inputs.
CALLED = "the model gets inputs that OneDiff does not support, perhaps from an extension or a script: "
HOOK = "has set a hook on conv_out"
PARAMETER = "it has unknown parameters .1., such as conv_out.adapter"


@pytest.mark.parametrize(("make", "change", "reason"), [
    (ldm_decoder, hook, HOOK), (of_diffusers, hook, HOOK),
    (ldm_decoder, extra_parameter, PARAMETER), (of_diffusers, extra_parameter, PARAMETER),
    (lambda: ldm_decoder(dropout=0.5), dropout_at_work, "drops values"),
    (lambda: ldm_decoder(resamp_with_conv=False), lambda decoder: None, "its with_conv is False"),
    (ldm_decoder, three_by_three, "3x3 convolution in its shortcut"),
    (ldm_decoder, other_attention, "mid.attn_1 is a .*Sequential"),
    (of_diffusers, processor, "the attention processor LoudProcessor is set"),
    (of_diffusers, mixed, "its weights are of mixed types: torch.bfloat16"),
    (of_diffusers, lambda decoder: decoder.double(), "float64"),
], ids=name_of)
def test_a_decoder_that_is_changed_or_has_unsupported_options_is_run_by_the_host(
    make: Callable[[], Any], change: Callable[[Any], Any], reason: str
) -> None:
    """make: makes the decoder, of ldm or diffusers. change: changes this decoder. reason: a pattern of the reason in
    the status."""
    decoder = make()
    change(decoder)
    assert_left_to_the_host(decoder, reason)


def test_a_decoder_of_a_patched_class_is_run_by_the_host_unless_the_host_trusts_the_patch(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """The patch replaces the attention's forward. HostTraits.trusted has the modules whose patches the host's adapter
    takes into account itself; with this module among them, OneDiff computes the decode."""
    decoder = ldm_decoder()
    original = ldm_module().AttnBlock.forward
    monkeypatch.setattr(ldm_module().AttnBlock, "forward", lambda self, x: 1 * original(self, x))
    assert_left_to_the_host(decoder, "AttnBlock.forward was replaced by test_vae_refusals")
    trusting = ldm_decoder()
    routed_picture(trusting, a_latent(trusting), HostTraits(trusted=(__name__,)))
    assert last_decode() == ("ours", "")


@pytest.mark.parametrize(("switch", "reason"), [("tanh_out", "tanh"), ("give_pre_end", "give_pre_end")])
def test_an_unsupported_option_that_is_set_on_ldms_decoder_leaves_the_next_decode_to_the_host(
    switch: str, reason: str
) -> None:
    """After the option is reset, OneDiff computes the next decode. switch: the option. reason: a part of the reason."""
    decoder = ldm_decoder()
    latent = a_latent(decoder)
    routed_picture(decoder, latent)
    assert last_decode() == ("ours", "")
    setattr(decoder, switch, True)
    assert_left_to_the_host(decoder, reason)
    setattr(decoder, switch, False)
    routed_picture(decoder, latent)
    assert last_decode() == ("ours", "")


@pytest.mark.parametrize(("kind", "config"), [
    ("AutoencoderTiny", {}),
    ("AsymmetricAutoencoderKL",
     {"down_block_out_channels": (8,), "up_block_out_channels": (8,), "norm_num_groups": 4}),
    ("AutoencoderKLTemporalDecoder", {"block_out_channels": (32,)}),
    ("VQModel", {"block_out_channels": (32, 64), "norm_num_groups": 4, "norm_type": "spatial",
                 "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}),
])
def test_an_unsupported_autoencoder_class_is_refused_in_one_line(kind: str, config: dict[str, Any]) -> None:
    import diffusers

    with pytest.raises(Refusal) as refusal:
        DECODERS.read(getattr(diffusers, kind)(**config).decoder)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("change", [
    lambda encoder: setattr(encoder.down[0].downsample, "with_conv", False),
    lambda encoder: setattr(encoder.down[0].downsample, "conv", nn.Conv2d(32, 32, 3, 2, 1)),
    lambda encoder: setattr(encoder.down[1], "block", encoder.down[1].block[:1]),
])
def test_an_encoder_of_another_structure_is_refused_in_one_line(change: Callable[[Any], None]) -> None:
    encoder = ldm_decoder(kind="Encoder")
    change(encoder)
    with pytest.raises(Refusal) as refusal:
        DECODERS.read(encoder)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("half", "channels"), [("decoder", 4), ("encoder", 3)])
def test_an_input_of_another_dtype_or_shape_gets_the_hosts_exception_and_a_reason(half: str, channels: int) -> None:
    """channels: how many the input of this half of the VAE must have; here it has one fewer. The input of an encoder is
    an image, so the reason does not call it a latent."""
    network = getattr(diffusers_vae(), half)
    with pytest.raises(RuntimeError):
        routed_picture(network, a_latent(network).half())
    assert last_decode() == ("host", "the VAE's input is in float16, but its weights are in float32")
    with pytest.raises(RuntimeError):
        routed_picture(network, a_latent(network)[:, 1:])
    shape = 1, channels - 1, 6, 6
    assert last_decode()[1] == (
        f"{CALLED}the VAE's input (shape {shape}) does not fit this VAE, which takes {channels} channels"
    )


def test_a_decode_under_autocast_to_another_dtype_is_run_by_the_host() -> None:
    decoder = diffusers_vae().decoder
    latent = a_latent(decoder)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = own_forward(decoder)(latent)
        ours = routed_picture(decoder, latent)
    assert torch.equal(ours, expected)
    assert last_decode() == ("host", "PyTorch's autocast computes in bfloat16, but the VAE's input is in float32")

"""The host's own picture, where OneDiff's decoder does not make it: decoded again where it is black."""
from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from vae_builders import a_latent, decodes, diffusers_vae, host_picture, last
from vae_precision_builders import STEP, Host, decode, in_float32, shown

from lib_onediff.runtime.runtime import runtime
from lib_onediff.runtime.vae.overflow import NOT_FINITE, ONE_COLOUR

pytestmark = pytest.mark.usefixtures("fresh_route", "nothing_known")


def foreign(host: Host, latent: Tensor, reason: str = "Decoder.forward was replaced by somebody") -> Tensor:
    runtime.vae.adopt(host.decoder)
    with torch.no_grad():
        return runtime.vae.decode_by_host(host.decoder, latent, lambda: host(latent), reason)


@pytest.mark.parametrize(("change", "saw"), [
    (lambda picture: picture * float("nan"), NOT_FINITE), (lambda picture: picture / 0, NOT_FINITE),
    (lambda picture: picture * 0, ONE_COLOUR), (lambda picture: torch.full_like(picture, 0.5), ONE_COLOUR),
    (lambda picture: torch.cat([picture[:1] * 0, picture[1:]]), ONE_COLOUR),
])
def test_a_black_picture_of_the_hosts_is_decoded_again(
    change: Callable[[Tensor], Tensor], saw: str, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host(diffusers_vae().decoder.half(), change)
    latent = a_latent(host.decoder, batch=2)
    with caplog.at_level(logging.WARNING, "onediff"):
        picture = foreign(host, latent)
    assert picture.dtype == torch.float16
    assert (shown(picture) - shown(in_float32(host.decoder, latent))).abs().max() <= STEP
    reason = f"decoded again in float32, because the VAE's own image is {saw}"
    assert last() == ("ours", reason) and caplog.messages == [f"VAE: {reason}."]
    assert decodes() == {"ours": 1, "host": 0}


def test_a_picture_of_the_hosts_that_can_be_shown_is_the_hosts() -> None:
    host = Host(diffusers_vae().decoder.half())
    latent = a_latent(host.decoder)
    assert torch.equal(foreign(host, latent), host_picture(host.decoder, latent))
    assert last() == ("host", "Decoder.forward was replaced by somebody") and decodes() == {"ours": 0, "host": 1}


def test_a_picture_of_the_hosts_that_we_cannot_decode_is_said_to_be_black(caplog: pytest.LogCaptureFixture) -> None:
    host = Host(diffusers_vae().decoder.half(), lambda picture: picture * float("nan"))
    host.decoder.conv_out.register_forward_hook(lambda module, given, output: output)
    latent = a_latent(host.decoder)
    with caplog.at_level(logging.WARNING, "onediff"):
        assert decode(host, latent).isnan().all()
    hooked = "conv_out has a forward hook"
    assert last()[0] == "host" and last()[1].count(hooked) == 2
    assert len(caplog.messages) == 1 and hooked in caplog.messages[0]


def test_a_host_that_overflows_where_we_do_not_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As attention that keeps its scores in float16 does."""
    host = Host(diffusers_vae().decoder.half(), lambda picture: picture * float("nan"))
    latent = a_latent(host.decoder)
    for _ in range(3):
        picture = decode(host, latent)
        assert (shown(picture) - shown(in_float32(host.decoder, latent))).abs().max() <= STEP
    assert host.calls == 1 and decodes() == {"ours": 3, "host": 0}


def test_a_picture_that_is_of_one_colour_in_every_type_is_shown() -> None:
    decoder = diffusers_vae().decoder.half()
    with torch.no_grad():
        decoder.conv_out.weight.zero_()
    host, latent = Host(decoder), a_latent(decoder)
    picture = decode(host, latent)
    assert torch.allclose(picture, host_picture(decoder, latent)) and last()[0] == "ours"
    # That says nothing of float16.
    assert not [name for name in runtime.tuning_cache._values if name.startswith("VAE")]
    assert torch.equal(foreign(host, latent), host_picture(decoder, latent))
    assert last()[0] == "host" and "of one colour in float32 too" in last()[1]
    wide = Host(diffusers_vae().decoder)
    with torch.no_grad():
        wide.decoder.conv_out.weight.zero_()
    assert torch.allclose(decode(wide, a_latent(wide.decoder)), host_picture(wide.decoder, a_latent(wide.decoder)))
    assert last() == ("ours", "")

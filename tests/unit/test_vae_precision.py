"""No black picture: a decode that overflows is repeated in a wider type, said so, and remembered of its VAE."""
from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from vae_builders import SD, a_latent, diffusers_vae, host_picture, last, ldm_decoder
from vae_precision_builders import (
    KNOWN,
    OVERFLOWED,
    STEP,
    Host,
    chosen,
    count_decodes,
    decode,
    in_float32,
    parameters_of,
    relative_error,
    scaled,
    shown,
    untouched,
)

from lib_onediff.model.vae.forward import Decoding
from lib_onediff.runtime.runtime import runtime
from lib_onediff.store.history import History

pytestmark = pytest.mark.usefixtures("fresh_route", "nothing_known")


@pytest.mark.parametrize(
    "make", [lambda: diffusers_vae().decoder, lambda: diffusers_vae(**SD).decoder, ldm_decoder],
    ids=["diffusers", "diffusers, SD", "ldm"],
)
def test_a_vae_that_overflows_gives_the_float32_picture_and_a_message(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    decoder, latent = scaled(3, make)
    assert not host_picture(decoder, latent).isfinite().all(), "the host's own image is black"
    before, host = parameters_of(decoder), Host(decoder)
    with caplog.at_level(logging.WARNING, "onediff"):
        picture = decode(host, latent)
    assert picture.dtype == torch.float16 and picture.std() > 0
    assert (shown(picture) - shown(in_float32(decoder, latent))).abs().max() <= STEP
    assert last() == ("ours", OVERFLOWED) and host.calls == 0
    assert caplog.messages == [f"VAE: {OVERFLOWED}. From now on, it is not decoded in float16."]
    assert untouched(decoder, before), "the host's VAE is as it was"


def test_it_is_remembered_of_the_vae(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    decoder, latent = scaled(3)
    host, types = Host(decoder), count_decodes(monkeypatch)
    decode(host, latent)
    assert types == [torch.float16, torch.float32]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "onediff"):
        decode(host, latent)
        decode(host, a_latent(decoder, 5, 7))
    assert types == [torch.float16, *[torch.float32] * 3] and host.calls == 0
    assert last() == ("ours", KNOWN) and caplog.messages == []
    other = Host(diffusers_vae(1).decoder.half())
    decode(other, a_latent(other.decoder))
    assert types[-1] == torch.float16 and last() == ("ours", ""), "another VAE of the same architecture"
    copied = Host(copy.deepcopy(decoder))
    decode(copied, latent)
    assert types[-1] == torch.float32 and last() == ("ours", KNOWN), "the same VAE, loaded again"
    with torch.no_grad():
        decoder.conv_in.weight /= 100
    decode(host, latent)
    assert types[-1] == torch.float16 and last() == ("ours", ""), "the same module with other weights"


def test_later_processes_know_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, latent = scaled(3)
    runtime.history.open(tmp_path)
    runtime.tuning_cache.attach(runtime.history.tuned, runtime.history.tune)
    decode(Host(decoder), latent)
    runtime.history.commit()
    later = History()
    later.open(tmp_path)
    runtime.tuning_cache.clear()
    runtime.tuning_cache.attach(later.tuned, later.tune)
    types = count_decodes(monkeypatch)
    decode(Host(decoder), latent)
    assert types == [torch.float32] and last() == ("ours", KNOWN)
    runtime.purge_disk()
    decode(Host(decoder), latent)
    assert types == [torch.float32, torch.float16, torch.float32], "forgotten with the rest"


def test_activations_near_the_limit_are_decoded_again_before_they_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, latent = scaled(0.95)
    assert host_picture(decoder, latent).isfinite().all()
    types, host = count_decodes(monkeypatch), Host(decoder)
    picture = decode(host, latent)
    assert types == [torch.float16, torch.float32]
    assert last() == (
        "ours", "decoded again in float32, because this VAE comes near the largest number of float16"
    )
    assert (shown(picture) - shown(in_float32(decoder, latent))).abs().max() <= STEP
    runtime.configure(chosen("fp16"))
    decode(host, latent)
    assert types[-1] == torch.float16 and last() == ("ours", ""), "whoever chooses fp16 has a picture to show in it"


@pytest.mark.parametrize("share", [0.01, 0.8])
def test_a_healthy_vae_decodes_once(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, latent = scaled(share)
    types, host = count_decodes(monkeypatch), Host(decoder)
    for _ in range(3):
        picture = decode(host, latent)
    assert types == [torch.float16] * 3 and last() == ("ours", "")
    assert host.calls == 1, "the check of its first use at this size"
    assert relative_error(picture, in_float32(decoder, latent)) < 1e-2
    assert not [name for name in runtime.tuning_cache._values if name.startswith("VAE")]


def test_no_memory_for_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, latent = scaled(3)
    run = Decoding.run
    types: list[torch.dtype] = []

    def too_large(self: Decoding, layout: Any, given: Tensor) -> Tensor:
        types.append(given.dtype)
        if given.dtype == torch.float32:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return run(self, layout, given)

    monkeypatch.setattr(Decoding, "run", too_large)
    picture = decode(Host(decoder), latent)
    assert types == [torch.float16, torch.float32, torch.bfloat16]
    assert last() == ("ours", OVERFLOWED.replace("float32", "bfloat16") + ", and there is no memory for float32")
    assert relative_error(picture, in_float32(decoder, latent)) < 6e-2


def test_weights_that_no_type_helps(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = diffusers_vae().decoder.half()
    latent = a_latent(decoder)
    with torch.no_grad():
        decoder.conv_out.bias[0] = float("nan")
    types, host = count_decodes(monkeypatch), Host(decoder)
    with caplog.at_level(logging.WARNING, "onediff"):
        assert decode(host, latent)[:, 0].isnan().all()
    assert types == [torch.float16, torch.float32] and host.calls == 1
    reason = "this VAE overflows in float16, and its image in float32 is not finite too"
    assert last() == ("host", reason)
    assert caplog.messages == [f"VAE: the image is not finite, and OneDiff could not help: {reason}."]
    assert not [name for name in runtime.tuning_cache._values if name.startswith("VAE")], "no verdict on float16"


def test_a_latent_that_the_unet_has_spoilt(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = diffusers_vae().decoder.half()
    latent = a_latent(decoder)
    latent[0, 0, 2, 2] = float("nan")
    types, host = count_decodes(monkeypatch), Host(decoder)
    with caplog.at_level(logging.WARNING, "onediff"):
        decode(host, latent)
    assert types == [torch.float16] and host.calls == 1
    assert last()[0] == "host" and "they come from the UNet" in last()[1] and "VAE's encoder" in last()[1]
    assert len(caplog.messages) == 1 and "they come from the UNet" in caplog.messages[0]

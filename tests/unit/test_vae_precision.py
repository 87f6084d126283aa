"""No black images: a decode that overflows in float16, by OneDiff or by the host, is repeated in a wider dtype, and the
user reads why. Later decodes of this VAE begin in that dtype. Also the option VAE precision.

Such a finding about a VAE (its verdict, NOT_FINITE) is stored. decode() is a decode by OneDiff, if it supports it; Host
counts the host's own decodes. types: the dtypes of OneDiff's decodes in order.
"""
from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import relative_error
from torch import Tensor
from vae_builders import (
    LDM_LAYOUTS,
    Host,
    a_latent,
    decode,
    decodes_by_route,
    diffusers_vae,
    in_float32,
    last_decode,
    ldm_decoder,
    overflowing_in_float16,
)

from lib_onediff.core.refusal import Refusal
from lib_onediff.core.settings import Settings
from lib_onediff.core.table import State
from lib_onediff.families.vae import Decoding
from lib_onediff.runtime.runtime import runtime
from lib_onediff.runtime.vae.wider_type import BROKEN, NOT_FINITE
from lib_onediff.store.history import History

pytestmark = pytest.mark.usefixtures("fresh_route")
# One level of an 8-bit image.
STEP = 1 / 255
OVERFLOWED = "decoded again in float32, because this VAE overflows in float16"
KNOWN = "decoded in float32, because this VAE overflows in float16"


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the option VAE precision fp16 decode in float16 on the CPU, as on a GPU."""
    monkeypatch.setattr("lib_onediff.runtime.vae.wider_type.SLOW_ON_CPU", ())


def shown(picture: Tensor) -> Tensor:
    """The image as a host shows it: clipped to 0 to 1."""
    return (picture.float() / 2 + 0.5).clamp(0, 1)


def parameters_of(decoder: Any) -> list[Any]:
    """Address, dtype, strides, version and a copy of each parameter."""
    return [(p.data_ptr(), p.dtype, p.stride(), p._version, p.detach().clone()) for p in decoder.parameters()]


def untouched(decoder: Any, before: list[Any]) -> bool:
    """Whether the parameters are those of an earlier parameters_of()."""
    after = parameters_of(decoder)
    return all(a[:4] == b[:4] and torch.equal(a[4], b[4]) for a, b in zip(after, before, strict=True))


def count_decodes(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """A list to which each decode by OneDiff adds its dtype from here on."""
    types: list[torch.dtype] = []
    run = Decoding.run

    def counted(self: Decoding, layout: Any, latent: Tensor) -> Tensor:
        types.append(latent.dtype)
        return run(self, layout, latent)

    monkeypatch.setattr(Decoding, "run", counted)
    return types


@pytest.mark.parametrize(
    "make", [lambda: diffusers_vae().decoder, lambda: ldm_decoder(**LDM_LAYOUTS["one layer"])], ids=["diffusers", "ldm"]
)
def test_a_decode_that_overflows_in_float16_gives_the_image_of_float32_and_a_message(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The image, in float16, differs by at most one of 255 levels from the one that a float32 copy of the VAE decodes.
    The host does not decode, and its VAE is unchanged."""
    decoder, latent = overflowing_in_float16(make)
    before = parameters_of(decoder)
    host = Host(decoder)
    with caplog.at_level(logging.WARNING, "onediff"):
        picture = decode(host, latent)
    assert picture.dtype == torch.float16 and picture.std() > 0
    assert (shown(picture) - shown(in_float32(decoder, latent))).abs().max() <= STEP
    assert last_decode() == ("ours", OVERFLOWED) and host.calls == 0
    assert caplog.messages == [f"VAE: {OVERFLOWED}. From now on, OneDiff does not use this VAE in float16."]
    assert untouched(decoder, before), "the host's VAE is as it was"


def test_later_decodes_of_an_overflowing_vae_begin_in_float32(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The verdict belongs to the weights: decodes of a copy of the VAE begin in float32 too; those of another VAE of
    the same architecture, and of the same VAE with other weights, begin in float16."""
    decoder, latent = overflowing_in_float16()
    host = Host(decoder)
    types = count_decodes(monkeypatch)
    decode(host, latent)
    assert types == [torch.float16, torch.float32]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "onediff"):
        decode(host, latent)
        decode(host, a_latent(decoder, 5, 7))
    assert types == [torch.float16, *[torch.float32] * 3] and host.calls == 0
    assert last_decode() == ("ours", KNOWN) and caplog.messages == []
    other = Host(diffusers_vae(1).decoder.half())
    decode(other, a_latent(other.decoder))
    assert types[-1] == torch.float16 and last_decode() == ("ours", ""), "another VAE of the same architecture"
    copied = Host(copy.deepcopy(decoder))
    decode(copied, latent)
    assert types[-1] == torch.float32 and last_decode() == ("ours", KNOWN), "the same VAE, loaded again"
    with torch.no_grad():
        decoder.conv_in.weight /= 100
    decode(host, latent)
    assert types[-1] == torch.float16 and last_decode() == ("ours", ""), "the same module with other weights"


@pytest.mark.parametrize("in_inference_mode", [False, True])
def test_after_an_edit_of_an_overflowing_vae_float16_is_tried_again(
    in_inference_mode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict belongs to the weights before the edit, which here changes one value. The new weights overflow too.
    in_inference_mode: whether the VAE is made and edited in torch.inference_mode()."""
    with torch.inference_mode(in_inference_mode):
        decoder, latent = overflowing_in_float16()
        host = Host(decoder)
        types = count_decodes(monkeypatch)
        for _ in range(2):
            decode(host, latent)
        assert types == [torch.float16, torch.float32, torch.float32] and last_decode() == ("ours", KNOWN)
        with torch.no_grad():
            decoder.conv_in.weight[-1, -1, -1, -1] += 1
        decode(host, latent)
        assert types[3:] == [torch.float16, torch.float32] and last_decode() == ("ours", OVERFLOWED)


def test_later_processes_decode_an_overflowing_vae_in_float32_until_a_purge(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict is stored on disk with the tuned choices of kernels, and purge_disk() removes it."""
    decoder, latent = overflowing_in_float16()
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
    assert types == [torch.float32] and last_decode() == ("ours", KNOWN)
    runtime.purge_disk()
    decode(Host(decoder), latent)
    assert types == [torch.float32, torch.float16, torch.float32], "forgotten with the rest"


def test_a_decode_that_does_not_overflow_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three decodes in float16, close to those of a float32 copy. The host decodes once, to check the first one. No
    verdict is stored."""
    host = Host(diffusers_vae().decoder.half())
    types = count_decodes(monkeypatch)
    latent = a_latent(host.decoder)
    for _ in range(3):
        picture = decode(host, latent)
    assert types == [torch.float16] * 3 and last_decode() == ("ours", "")
    assert host.calls == 1, "the check of its first use at this size"
    assert relative_error(picture.float(), in_float32(host.decoder, latent)) < 1e-2
    assert not [name for name in runtime.history.tuned() if name.startswith("VAE")]


def test_an_overflowing_vae_without_memory_for_float32_is_decoded_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 has float32's range, and half of its bytes. Here each decode in float32 runs out of memory. The reason
    names the overflow and the lack of memory."""
    decoder, latent = overflowing_in_float16()
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
    overflowed = OVERFLOWED.replace("float32", "bfloat16")
    assert last_decode() == ("ours", f"{overflowed}, and there is too little GPU memory for float32")
    assert relative_error(picture.float(), in_float32(decoder, latent)) < 6e-2


def test_a_vae_with_nan_weights_gives_the_image_of_the_host_and_a_message(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode in float32 is not finite either, so that no verdict on float16 is stored."""
    decoder = diffusers_vae().decoder.half()
    latent = a_latent(decoder)
    with torch.no_grad():
        decoder.conv_out.bias[0] = float("nan")
    types = count_decodes(monkeypatch)
    host = Host(decoder)
    with caplog.at_level(logging.WARNING, "onediff"):
        assert decode(host, latent)[:, 0].isnan().all()
    assert types == [torch.float16, torch.float32] and host.calls == 1
    reason = "this VAE overflows in float16, and its image in float32 is broken (NaN or infinite values) too"
    assert last_decode() == ("host", reason)
    assert caplog.messages == [
        f"VAE: the image is {BROKEN}, so the picture may be black, and OneDiff could not make a better one: "
        f"{reason}."
    ]
    assert not [name for name in runtime.history.tuned() if name.startswith("VAE")], "no verdict on float16"


@pytest.mark.parametrize("half", ["decoder", "encoder"])
def test_a_latent_or_an_image_with_nan_is_not_computed_again_and_the_message_names_the_input_as_the_cause(
    half: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No wider dtype would help. OneDiff computes once, and the host once more: the result is the host's. The input of
    the encoder is no latent, and does not come from the UNet."""
    decoder = getattr(diffusers_vae(), half).half()
    latent = a_latent(decoder)
    latent[0, 0, 2, 2] = float("nan")
    types = count_decodes(monkeypatch)
    host = Host(decoder)
    with caplog.at_level(logging.WARNING, "onediff"):
        decode(host, latent)
    assert types == [torch.float16] and host.calls == 1
    route, reason = last_decode()
    assert route == "host" and "the VAE's input has NaN" in reason and "--no-half" in reason
    assert len(caplog.messages) == 1 and "the VAE's input has NaN" in caplog.messages[0]


CLOSE = {"fp16": 1e-2, "bf16": 6e-2, "fp32": 1e-2}
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("choice", TYPES)
def test_the_option_vae_precision_chooses_the_dtype_of_our_decode(
    choice: str, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """choice: the option's value. stored: the dtype of the VAE's weights, which are not changed, and of the image. The
    image is close to that of a float32 copy. The host decodes once, to check the first of two decodes."""
    decoder = diffusers_vae().decoder.to(stored)
    latent = a_latent(decoder)
    runtime.configure(Settings(vae_precision=choice))
    before = parameters_of(decoder)
    types = count_decodes(monkeypatch)
    host = Host(decoder)
    for _ in range(2):
        picture = decode(host, latent)
    assert types == [TYPES[choice]] * 2 and last_decode() == ("ours", "") and host.calls == 1
    assert picture.dtype == stored
    worst = max(CLOSE[choice], 6e-2 if stored == torch.bfloat16 else 0)
    assert relative_error(picture.float(), in_float32(decoder, latent)) < worst
    assert untouched(decoder, before)
    (entry,) = runtime.table.entries()
    assert (entry.key.dtype, entry.key.latent_dtype, entry.state) == (TYPES[choice], stored, State.PROVED)


def test_on_a_cpu_vae_precision_fp16_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU takes many times as long in float16. Each VAE is decoded in the dtype of its weights, float16 too."""
    monkeypatch.setattr("lib_onediff.runtime.vae.wider_type.SLOW_ON_CPU", {"fp16"})
    types = count_decodes(monkeypatch)
    runtime.configure(Settings(vae_precision="fp16"))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        host = Host(diffusers_vae().decoder.to(dtype))
        decode(host, a_latent(host.decoder))
    assert types == [torch.float32, torch.bfloat16, torch.float16] and last_decode() == ("ours", "")


def test_with_vae_precision_fp16_a_decode_that_overflows_is_repeated_in_float32(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """The VAE's weights are in float32. The image differs by at most one of 255 levels from that of the VAE in float32,
    and the second decode begins in float32."""
    in_half, latent = overflowing_in_float16()
    decoder = copy.deepcopy(in_half).float()
    types = count_decodes(monkeypatch)
    runtime.configure(Settings(vae_precision="fp16"))
    host = Host(decoder)
    for _ in range(2):
        picture = decode(host, latent.float())
        assert (shown(picture) - shown(in_float32(in_half, latent))).abs().max() <= STEP
    assert types == [torch.float16, torch.float32, torch.float32] and host.calls == 0


@pytest.mark.parametrize("stored", [None, 3, True, "nonsense", {"saw": NOT_FINITE}, [NOT_FINITE]])
def test_an_unknown_stored_verdict_on_float16_is_ignored(stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """stored: a value in the store that another version or a damaged file may have. With the known verdict (NOT_FINITE)
    the decode begins in float32, with an unknown one in float16."""
    decoder, latent = overflowing_in_float16()
    types = count_decodes(monkeypatch)
    host = Host(decoder)
    decode(host, latent)
    [name] = [name for name in runtime.history.tuned() if name.startswith("VAE")]
    for known, first in ((NOT_FINITE, torch.float32), (stored, torch.float16)):
        runtime.tuning_cache.set(name, known)
        types.clear()
        decode(host, latent)
        assert types[0] == first


def decode_refused(host: Host, latent: Tensor) -> Tensor:
    """The image of a decode that OneDiff leaves to the host, because the decoder's forward was replaced."""
    def check() -> None:
        raise Refusal("Decoder.forward was replaced by somebody")

    runtime.vae.adopt(host.decoder)
    with torch.no_grad():
        return runtime.vae.decode(host.decoder, latent, lambda: host(latent), check=check)


@pytest.mark.parametrize("change", [
    lambda picture: picture * float("nan"), lambda picture: torch.cat([picture[:1] / 0, picture[1:]]),
])
def test_a_black_image_that_the_host_has_decoded_is_decoded_again_by_onediff_in_float32(
    change: Callable[[Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """OneDiff has left the decode to the host, because the decoder's forward was replaced; the host's image is not
    finite. change: makes all of it NaN, or one image of the batch infinite."""
    host = Host(diffusers_vae().decoder.half(), change)
    latent = a_latent(host.decoder, batch=2)
    with caplog.at_level(logging.WARNING, "onediff"):
        picture = decode_refused(host, latent)
    assert picture.dtype == torch.float16
    assert (shown(picture) - shown(in_float32(host.decoder, latent))).abs().max() <= STEP
    reason = f"decoded again in float32, because the VAE's own image is {BROKEN}"
    assert last_decode() == ("ours", reason) and caplog.messages == [f"VAE: {reason}."]
    assert decodes_by_route() == {"ours": 1, "host": 0}


def test_a_message_says_why_a_black_image_of_the_host_is_not_decoded_again(caplog: pytest.LogCaptureFixture) -> None:
    """An extension has set a hook on the decoder, and a decode by OneDiff would skip it. The image is the host's."""
    host = Host(diffusers_vae().decoder.half(), lambda picture: picture * float("nan"))
    host.decoder.conv_out.register_forward_hook(lambda module, given, output: output)
    latent = a_latent(host.decoder)
    with caplog.at_level(logging.WARNING, "onediff"):
        assert decode(host, latent).isnan().all()
    hooked = "has set a hook on conv_out"
    assert last_decode()[0] == "host" and last_decode()[1].count(hooked) == 2
    assert len(caplog.messages) == 1 and hooked in caplog.messages[0]


def test_our_decode_is_used_if_only_the_decode_of_the_host_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    """An example is a host that computes attention scores in float16. The host decodes once, to check the first of
    three decodes: its image with NaN is no reason to discard ours, which are close to those of a float32 copy."""
    host = Host(diffusers_vae().decoder.half(), lambda picture: picture * float("nan"))
    latent = a_latent(host.decoder)
    for _ in range(3):
        picture = decode(host, latent)
        assert (shown(picture) - shown(in_float32(host.decoder, latent))).abs().max() <= STEP
    assert host.calls == 1 and decodes_by_route() == {"ours": 3, "host": 0}

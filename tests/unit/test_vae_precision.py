"""No black picture: a decode that overflows is repeated in a wider type, said so, and remembered of its VAE."""
from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from vae_builders import (
    SD,
    a_latent,
    decodes,
    diffusers_vae,
    fresh_route,  # noqa: F401
    host_picture,
    last,
    ldm_decoder,
)

from lib_onediff.accelerator import runtime
from lib_onediff.ops import torch_ops
from lib_onediff.settings import Settings
from lib_onediff.shapes.history import History
from lib_onediff.shapes.table import State
from lib_onediff.unet.weights import Affine
from lib_onediff.vae.bound import BoundDecoder, Habits
from lib_onediff.vae.forward import Decoding
from lib_onediff.vae.precision import CastWeights, KnownVaes, digest_of, verdict_name
from lib_onediff.vae.serving import UNCOMPARED, DecodeLadder
from lib_onediff.vae.watch import NOT_FINITE, ONE_COLOUR, SATURATED, WatchedOperators, look_at

pytestmark = pytest.mark.usefixtures("fresh_route")
LIMIT = torch.finfo(torch.float16).max
STEP = 1 / 255
OVERFLOWED = "decoded again in float32, because this VAE overflows in float16"
KNOWN = "decoded in float32, because this VAE overflows in float16"


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    runtime.choices.clear()
    yield
    runtime.choices.clear()


class Host:
    """A host's VAE, whose own decodes are counted; change: what becomes of them."""

    def __init__(self, decoder: Any, change: Callable[[Tensor], Tensor] = lambda picture: picture) -> None:
        self.decoder, self.change, self.calls = decoder, change, 0

    def __call__(self, latent: Tensor) -> Tensor:
        self.calls += 1
        return self.change(host_picture(self.decoder, latent))


@torch.no_grad()
def decode(host: Host, latent: Tensor) -> Tensor:
    runtime.vae.adopt(host.decoder)
    return runtime.vae.decode(host.decoder, latent, lambda: host(latent))


def chosen(precision: str, **others: Any) -> Settings:
    settings = Settings(**others)
    object.__setattr__(settings, "vae_precision", precision)
    return settings


def largest_of(decoder: Any, latent: Tensor) -> float:
    """The largest activation of a decode in float32."""
    wide = copy.deepcopy(decoder).float()
    bound = BoundDecoder(wide, None, Habits())
    bound.look()
    watched = WatchedOperators(torch_ops)
    with torch.no_grad():
        Decoding(bound.weights(), watched, False, fold_biases=False).run(bound.layout, latent.float())
    return float(torch.stack(watched.peaks).max())


def scaled(share: float, make: Callable[[], Any] = lambda: diffusers_vae().decoder) -> tuple[Any, Tensor]:
    """A decoder in float16 whose activations reach a share of float16's limit, and a latent of its own.

    Norms make its picture what it was: only what lies between them is large.
    """
    decoder = make().half()
    latent = a_latent(decoder)
    with torch.no_grad():
        for _ in range(3):
            decoder.conv_in.weight *= (share * LIMIT / largest_of(decoder, latent)) ** 0.999
            decoder.conv_in.bias.zero_()
    assert torch.isfinite(decoder.conv_in.weight).all()
    return decoder, latent


def in_float32(decoder: Any, latent: Tensor) -> Tensor:
    return host_picture(copy.deepcopy(decoder).float(), latent.float())


def shown(picture: Tensor) -> Tensor:
    """As a host turns it into a picture: 0 to 1."""
    return (picture.float() / 2 + 0.5).clamp(0, 1)


def relative_error(picture: Tensor, expected: Tensor) -> float:
    return float((picture.float() - expected).norm() / expected.norm())


def parameters_of(decoder: Any) -> list[Any]:
    return [(p.data_ptr(), p.dtype, p.stride(), p._version, p.detach().clone()) for p in decoder.parameters()]


def untouched(decoder: Any, before: list[Any]) -> bool:
    after = parameters_of(decoder)
    return all(a[:4] == b[:4] and torch.equal(a[4], b[4]) for a, b in zip(after, before, strict=True))


# --- a VAE that overflows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [lambda: diffusers_vae().decoder, lambda: diffusers_vae(**SD).decoder, ldm_decoder],
    ids=["diffusers", "diffusers, SD", "ldm"],
)
def test_a_vae_that_overflows_gives_the_float32_picture_and_a_message(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    decoder, latent = scaled(3, make)
    assert not host_picture(decoder, latent).isfinite().all(), "the host's own picture is black"
    before, host = parameters_of(decoder), Host(decoder)
    with caplog.at_level(logging.WARNING, "onediff"):
        picture = decode(host, latent)
    assert picture.dtype == torch.float16 and picture.std() > 0
    assert (shown(picture) - shown(in_float32(decoder, latent))).abs().max() <= STEP
    assert last() == ("ours", OVERFLOWED) and host.calls == 0
    assert caplog.messages == [f"VAE: {OVERFLOWED}. From now on, it is not decoded in float16."]
    assert untouched(decoder, before), "the host's VAE is as it was"


def count_decodes(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The type of every decode of ours."""
    types: list[torch.dtype] = []
    run = Decoding.run

    def counted(self: Decoding, layout: Any, latent: Tensor) -> Tensor:
        types.append(latent.dtype)
        return run(self, layout, latent)

    monkeypatch.setattr(Decoding, "run", counted)
    return types


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
    runtime.choices.attach(runtime.history.tuned, runtime.history.tune)
    decode(Host(decoder), latent)
    runtime.history._store.flush()
    later = History()
    later.open(tmp_path)
    runtime.choices.clear()
    runtime.choices.attach(later.tuned, later.tune)
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
    assert not [name for name in runtime.choices._values if name.startswith("VAE")]


def test_the_watch_changes_no_picture() -> None:
    decoder, latent = scaled(0.5)
    host = Host(decoder)
    watched = decode(host, latent)
    runtime.configure(chosen("fp16"))
    assert torch.equal(decode(host, latent), watched)


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


def test_no_memory_at_all_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, latent = scaled(3)
    freed: list[bool] = []

    def too_large(self: Decoding, layout: Any, given: Tensor) -> Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Decoding, "run", too_large)
    monkeypatch.setattr(runtime, "free_graphs", lambda: freed.append(True))
    host = Host(decoder, lambda picture: torch.rand(picture.shape))
    decode(host, latent)
    assert host.calls == 1 and freed == [True] and last() == ("host", "out of GPU memory: the graphs were freed")


def test_weights_that_no_type_helps(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = diffusers_vae().decoder.half()
    latent = a_latent(decoder)
    with torch.no_grad():
        decoder.conv_out.bias[0] = float("nan")
    types, host = count_decodes(monkeypatch), Host(decoder)
    with caplog.at_level(logging.WARNING, "onediff"):
        assert decode(host, latent)[:, 0].isnan().all()
    assert types == [torch.float16, torch.float32] and host.calls == 1
    reason = "this VAE overflows in float16, and its picture in float32 is not finite too"
    assert last() == ("host", reason)
    assert caplog.messages == [f"VAE: the picture is not finite, and OneDiff could not help: {reason}."]
    assert not [name for name in runtime.choices._values if name.startswith("VAE")], "no verdict on float16"


def test_a_latent_that_the_unet_has_spoilt(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = diffusers_vae().decoder.half()
    latent = a_latent(decoder)
    latent[0, 0, 2, 2] = float("nan")
    types, host = count_decodes(monkeypatch), Host(decoder)
    with caplog.at_level(logging.WARNING, "onediff"):
        decode(host, latent)
    assert types == [torch.float16] and host.calls == 1
    assert last()[0] == "host" and "they come from the UNet" in last()[1]
    assert len(caplog.messages) == 1 and "they come from the UNet" in caplog.messages[0]


# --- the host's own picture -------------------------------------------------------------------------------------------


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
    reason = f"decoded again in float32, because the VAE's own picture is {saw}"
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
    assert not [name for name in runtime.choices._values if name.startswith("VAE")], "which says nothing of float16"
    assert torch.equal(foreign(host, latent), host_picture(decoder, latent))
    assert last()[0] == "host" and "of one colour in float32 too" in last()[1]
    wide = Host(diffusers_vae().decoder)
    with torch.no_grad():
        wide.decoder.conv_out.weight.zero_()
    assert torch.allclose(decode(wide, a_latent(wide.decoder)), host_picture(wide.decoder, a_latent(wide.decoder)))
    assert last() == ("ours", "")


def test_switched_off_nothing_is_looked_at() -> None:
    runtime.configure(Settings(enabled=False))
    host = Host(diffusers_vae().decoder.half(), lambda picture: picture * 0)
    latent = a_latent(host.decoder)
    assert (decode(host, latent) == 0).all() and (foreign(host, latent) == 0).all()
    assert decodes() == {"ours": 0, "host": 2}


def test_what_is_no_picture_is_left_alone() -> None:
    host = Host(diffusers_vae().decoder, lambda picture: (picture * float("nan"),))
    latent = a_latent(host.decoder)
    assert isinstance(foreign(host, latent), tuple)


def test_a_fault_of_ours_costs_no_picture_of_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Any:
        raise AttributeError("no such thing")

    host = Host(diffusers_vae().decoder.half(), lambda picture: picture * 0)
    monkeypatch.setattr(DecodeLadder, "repeat", broken)
    assert (foreign(host, a_latent(host.decoder)) == 0).all()
    assert "a fault of ours, please report it: no such thing" in last()[1]


# --- what the user has chosen -----------------------------------------------------------------------------------------

CLOSE = {"fp16": 1e-2, "bf16": 6e-2, "fp32": 1e-2}
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("choice", TYPES)
def test_a_type_of_choice(choice: str, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = diffusers_vae(**SD).decoder.to(stored)
    latent = a_latent(decoder)
    runtime.configure(chosen(choice))
    before, types, host = parameters_of(decoder), count_decodes(monkeypatch), Host(decoder)
    for _ in range(2):
        picture = decode(host, latent)
    assert types == [TYPES[choice]] * 2 and last() == ("ours", "") and host.calls == 1
    assert picture.dtype == stored
    worst = max(CLOSE[choice], 6e-2 if stored == torch.bfloat16 else 0)
    assert relative_error(picture, in_float32(decoder, latent)) < worst
    assert untouched(decoder, before)
    (entry,) = runtime.table.entries()
    assert (entry.key.dtype, entry.key.latent_dtype, entry.state) == (TYPES[choice], stored, State.PROVED)


def test_auto_keeps_to_the_hosts_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """As --no-half-vae has it."""
    types = count_decodes(monkeypatch)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        host = Host(diffusers_vae().decoder.to(dtype))
        decode(host, a_latent(host.decoder))
    assert types == [torch.float32, torch.bfloat16, torch.float16]


def test_whoever_chooses_float16_sees_no_black_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    half, latent = scaled(3)
    decoder, types = copy.deepcopy(half).float(), count_decodes(monkeypatch)
    runtime.configure(chosen("fp16"))
    host = Host(decoder)
    for _ in range(2):
        picture = decode(host, latent.float())
        assert (shown(picture) - shown(in_float32(half, latent))).abs().max() <= STEP
    assert types == [torch.float16, torch.float32, torch.float32] and host.calls == 0


def test_another_type_gives_another_entry() -> None:
    decoder = diffusers_vae().decoder.half()
    latent, host = a_latent(decoder), Host(decoder)
    for choice in ("auto", "fp16", "bf16", "fp32"):
        runtime.configure(chosen(choice))
        decode(host, latent)
    assert len(runtime.table.entries()) == 3 and host.calls == 3


def test_repeated_decodes_have_entries_of_their_own() -> None:
    decoder, latent = scaled(3)
    decode(Host(decoder), latent)
    inputs = {entry.key.dtype: entry.key.inputs for entry in runtime.table.entries()}
    assert UNCOMPARED in inputs[torch.float32] and UNCOMPARED not in inputs[torch.float16]
    assert all(entry.key.is_decode for entry in runtime.table.entries())
    assert runtime.rows()[0].model == "VAE decoder"


# --- the parts --------------------------------------------------------------------------------------------------------


def test_the_digest_of_a_vae() -> None:
    decoder = diffusers_vae().decoder.half()

    def digest() -> str:
        bound = BoundDecoder(decoder, None, Habits())
        bound.look()
        return digest_of(bound.layout.architecture, bound.weights())

    seen = [digest(), digest()]
    assert seen[0] == seen[1]
    parameters = dict(decoder.named_parameters())
    for name in ("conv_in.weight", "conv_out.bias", "up_blocks.0.resnets.0.norm1.weight"):
        with torch.no_grad():
            parameters[name] *= 1.5
        seen.append(digest())
    assert len(set(seen)) == 4
    decoder.to(memory_format=torch.channels_last)
    assert digest() == seen[-1], "how it lies in memory is no matter"
    decoder.float()
    assert digest() != seen[-1]


@pytest.mark.parametrize("stored", [None, 3, True, "nonsense", {"saw": NOT_FINITE}, [NOT_FINITE]])
def test_a_store_that_anybody_has_written(stored: Any) -> None:
    runtime.choices.set(verdict_name("abc", torch.float16), stored)
    assert KnownVaes(runtime.choices).saw("abc", torch.float16) is None


def test_cast_weights_are_cast_one_layer_at_a_time() -> None:
    weights = {"a": Affine(torch.ones(2, 2, dtype=torch.float16), None), "b": Affine(torch.ones(2), torch.ones(2))}
    cast = CastWeights(weights, torch.float32)
    assert list(cast) == ["a", "b"] and len(cast) == 2
    assert cast["a"].weight.dtype == torch.float32 and cast["a"].bias is None
    assert cast["b"].weight is weights["b"].weight, "what has the type already is not copied"
    assert cast["a"].weight is not cast["a"].weight, "and nothing is kept"


@pytest.mark.parametrize(("spoil", "peaks", "saw"), [
    (lambda picture: None, [1.0], None),
    (lambda picture: picture[1, 2].fill_(7), [1.0], None),
    (lambda picture: picture[1].fill_(7), [1.0], ONE_COLOUR),
    (lambda picture: picture[0, 0, 3, 3].fill_(float("nan")), [1.0], NOT_FINITE),
    (lambda picture: picture[0, 0, 3, 3].fill_(float("-inf")), [1.0], NOT_FINITE),
    (lambda picture: None, [1.0, float("nan"), 2.0], NOT_FINITE),
    (lambda picture: None, [float("inf"), 2.0], NOT_FINITE),
    (lambda picture: None, [0.91 * LIMIT, 2.0], SATURATED),
    (lambda picture: None, [0.89 * LIMIT, 2.0], None),
])
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_what_is_seen_of_a_decode(spoil: Any, peaks: list[float], saw: str | None, format: Any) -> None:
    picture = torch.rand(2, 3, 8, 8).half().contiguous(memory_format=format)
    spoil(picture)
    found = look_at(picture, torch.rand(2, 4, 1, 1), [torch.tensor(peak).half() for peak in peaks])
    assert (found.saw, found.latent_is_finite) == (saw, True)
    assert not look_at(picture, torch.full((2, 4, 1, 1), float("inf")), []).latent_is_finite


def test_every_image_is_watched() -> None:
    decoder = diffusers_vae(**SD).decoder
    bound = BoundDecoder(decoder, None, Habits())
    bound.look()
    watched = WatchedOperators(torch_ops)
    with torch.no_grad():
        picture = Decoding(bound.weights(), watched, False, fold_biases=False).run(bound.layout, a_latent(decoder))
    convolutions = [leaf for leaf in bound.layout.leaves() if type(leaf).__name__ == "Convolution"]
    blocks = [layer for layer in bound.layout.layers if type(layer).__name__ in ("ResidualBlock", "PixelAttention")]
    assert len(watched.peaks) == len(convolutions) + len(blocks)
    assert float(watched.peaks[-1]) == float(picture.abs().max())

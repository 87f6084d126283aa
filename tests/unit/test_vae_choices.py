"""The VAE's type as the user has chosen it, and the parts that choosing is made of."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from vae_builders import SD, a_latent, diffusers_vae, last
from vae_precision_builders import (
    LIMIT,
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

from lib_onediff.core.affine import Affine
from lib_onediff.core.table import State
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.families.vae.forward import Decoding
from lib_onediff.runtime.runtime import runtime
from lib_onediff.runtime.vae import precision
from lib_onediff.runtime.vae.bound import BoundDecoder, HostTraits
from lib_onediff.runtime.vae.decode import UNCOMPARED
from lib_onediff.runtime.vae.precision import (
    NOT_FINITE,
    ONE_COLOUR,
    SATURATED,
    CastWeights,
    KnownVae,
    WatchedOperators,
    look_at,
)

pytestmark = pytest.mark.usefixtures("fresh_route", "nothing_known")


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


def test_on_a_cpu_nobody_waits_for_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a CPU many times as long."""
    monkeypatch.setattr(precision, "SLOW_ON_CPU", {"fp16"})
    types = count_decodes(monkeypatch)
    runtime.configure(chosen("fp16"))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        host = Host(diffusers_vae().decoder.to(dtype))
        decode(host, a_latent(host.decoder))
        reason = f"decoded in {str(dtype).removeprefix('torch.')}, because CPUs decode float16 many times slower"
        assert last() == ("ours", reason if dtype != torch.float16 else "")
    assert types == [torch.float32, torch.bfloat16, torch.float16]


def test_auto_keeps_to_the_hosts_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """As --no-half-vae has it."""
    types = count_decodes(monkeypatch)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        host = Host(diffusers_vae().decoder.to(dtype))
        decode(host, a_latent(host.decoder))
    assert types == [torch.float32, torch.bfloat16, torch.float16]


def test_whoever_chooses_float16_sees_no_black_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    in_half, latent = scaled(3)
    decoder, types = copy.deepcopy(in_half).float(), count_decodes(monkeypatch)
    runtime.configure(chosen("fp16"))
    host = Host(decoder)
    for _ in range(2):
        picture = decode(host, latent.float())
        assert (shown(picture) - shown(in_float32(in_half, latent))).abs().max() <= STEP
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
        bound = BoundDecoder(decoder, None, HostTraits())
        bound.look()
        return KnownVae(runtime.tuning_cache, bound.layout.architecture, bound.weights()).digest

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
    vae = KnownVae(runtime.tuning_cache, "abc", {})
    vae.remember(torch.float16, stored)
    assert vae.saw(torch.float16) is None


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
    assert look_at(picture, [torch.tensor(peak).half() for peak in peaks]) == saw


def test_every_image_is_watched() -> None:
    decoder = diffusers_vae(**SD).decoder
    bound = BoundDecoder(decoder, None, HostTraits())
    bound.look()
    watched = WatchedOperators(torch_ops)
    with torch.no_grad():
        picture = Decoding(bound.weights(), watched, False, fold_biases=False).run(bound.layout, a_latent(decoder))
    convolutions = [leaf for leaf in bound.layout.leaves() if type(leaf).__name__ == "Convolution"]
    blocks = [layer for layer in bound.layout.layers if type(layer).__name__ in ("ResidualBlock", "PixelAttention")]
    assert len(watched.peaks) == len(convolutions) + len(blocks)
    assert float(watched.peaks[-1]) == float(picture.abs().max())

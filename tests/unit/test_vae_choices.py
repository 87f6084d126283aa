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

from lib_onediff.runtime.runtime import runtime
from lib_onediff.runtime.vae import fallback, precision
from lib_onediff.runtime.vae.overflow import NOT_FINITE, ONE_COLOUR, SATURATED, look_at
from lib_onediff.runtime.vae.precision import KnownVaes, verdict_name
from lib_onediff.shapes.table import State

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
    monkeypatch.setattr(fallback, "SLOW_ON_CPU", precision.SLOW_ON_CPU)
    types = count_decodes(monkeypatch)
    runtime.configure(chosen("fp16"))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        host = Host(diffusers_vae().decoder.to(dtype))
        decode(host, a_latent(host.decoder))
        reason = f"decoded in {str(dtype).removeprefix('torch.')}, because CPUs decode float16 many times slower"
        assert last() == ("ours", reason if dtype != torch.float16 else "")
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


# --- the parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [None, 3, True, "nonsense", {"saw": NOT_FINITE}, [NOT_FINITE]])
def test_a_store_that_anybody_has_written(stored: Any) -> None:
    runtime.tuning_cache.set(verdict_name("abc", torch.float16), stored)
    assert KnownVaes(runtime.tuning_cache).saw("abc", torch.float16) is None


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

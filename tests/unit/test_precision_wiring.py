"""The settings for precision reach our calls, are part of the key of a shape's table entry, and are restored
afterwards."""
from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from builders import a_call, diffusers_output, diffusers_unet, relative_error, served
from torch import Tensor
from vae_builders import a_latent, diffusers_vae, last_decode, routed_picture

import lib_onediff
from lib_onediff.core.layer_weights import LayerWeights
from lib_onediff.core.operators import GatedUnit
from lib_onediff.core.precision import SWITCHES, TF32_MATMUL, Flags, flags_for
from lib_onediff.core.settings import Settings
from lib_onediff.core.table import State
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.runtime.runtime import runtime


@pytest.fixture(autouse=True)
def switches_stay_as_they_are() -> Iterator[None]:
    before = {name: switch.state() for name, switch in SWITCHES.items() if switch.read() is not None}
    yield
    assert {name: SWITCHES[name].state() for name in before} == before


def as_on_a_gpu(settings: Any, dtype: torch.dtype, device: torch.device, upcast_attention: bool = False) -> Flags:
    return flags_for(settings, torch.float32, torch.device("cuda"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """A CPU with the switches of a GPU. The list has the value of the switch for TF32 products at each of our calls."""
    switch = SWITCHES[TF32_MATMUL]
    before = switch.state()
    switch.write(False)
    stood: list[bool] = []
    gated = torch_ops.gated

    def watched(tokens: Tensor, unit: GatedUnit, reader: LayerWeights) -> Tensor:
        stood.append(SWITCHES[TF32_MATMUL].read())
        return gated(tokens, unit, reader)

    for module in ("runtime.card_route", "runtime.vae.decode"):
        monkeypatch.setattr(f"lib_onediff.{module}.flags_for", as_on_a_gpu)
    monkeypatch.setattr(torch_ops, "gated", watched)
    yield stood
    switch.restore(before)


def choose(**values: Any) -> None:
    runtime.configure(Settings(**values))


def test_the_setting_accumulation_sets_the_tf32_switch_only_during_our_calls(gpu: list[bool]) -> None:
    """The output is compared with the host's. Each value of the setting has a table entry of its own."""
    unet = diffusers_unet()
    lib_onediff.hosts.diffusers.unet.attach(unet)
    call = a_call(unet)
    found = SWITCHES[TF32_MATMUL].read()
    for choice, inside in (("half", True), ("full", found)):
        choose(accumulation=choice)
        gpu.clear()
        assert relative_error(served(unet, call), diffusers_output(unet, call)) < 1e-5
        assert set(gpu) == {inside} and SWITCHES[TF32_MATMUL].read() is found
    precisions = [dict(entry.key.precision)[TF32_MATMUL] for entry in runtime.table.entries()]
    assert sorted(precisions) == [False, True], "each has an entry of its own, checked of its own"
    lib_onediff.hosts.diffusers.unet.detach(unet)


@pytest.mark.usefixtures("fresh_route")
def test_the_setting_accumulation_sets_the_tf32_switch_during_our_vae_decodes(
    gpu: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """stood: the value of the switch within each decode. Each value of the setting has a table entry of its own."""
    stood: list[bool] = []
    resize = torch_ops.resize

    def watched(*given: Any) -> Tensor:
        stood.append(SWITCHES[TF32_MATMUL].read())
        return resize(*given)

    monkeypatch.setattr(torch_ops, "resize", watched)
    decoder = diffusers_vae().decoder
    for choice in ("full", "half"):
        routed_picture(decoder, a_latent(decoder), settings=Settings(accumulation=choice))
        assert last_decode() == ("ours", "")
    assert set(stood) == {True, False} and len(runtime.table.entries()) == 2


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.fixture
def overflowing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Attention that overflows unless it is computed in float32, as SD 2.1's does in float16. The list has, for each
    attention, whether float32 was asked for."""
    attention = torch_ops.attention
    asked: list[bool] = []

    def overflows(query: Tensor, key: Tensor, value: Tensor, upcast: bool, mask: Tensor | None = None) -> Tensor:
        asked.append(upcast)
        output = attention(query, key, value, upcast, mask)
        return output if upcast else output * float("nan")

    monkeypatch.setattr(torch_ops, "attention", overflows)
    return asked


def test_attention_that_overflows_is_computed_again_in_float32_and_remembered(
    overflowing: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    """The output is compared with the host's. A warning is logged once, and calls at other sizes begin in float32."""
    unet = lib_onediff.compile_unet(diffusers_unet())
    call = a_call(unet)
    with caplog.at_level(logging.WARNING, "onediff"):
        assert relative_error(served(unet, call), diffusers_output(unet, call)) < 1e-5
    assert len(caplog.messages) == 1 and "attention overflows" in caplog.messages[0]
    assert set(overflowing) == {False, True}
    overflowing.clear()
    for size in ((8, 8), (5, 7)):
        served(unet, a_call(unet, *size))
    assert set(overflowing) == {True} and lib_onediff.status()["route"] == "plain"
    assert len(caplog.messages) == 1


def test_our_forward_computes_a_model_whose_own_forward_overflows(caplog: pytest.LogCaptureFixture) -> None:
    """The host's output is NaN, so that ours cannot be compared with it. Ours is used unchecked, which is logged
    once."""
    unet = diffusers_unet()
    runtime.adopt(unet)
    call = a_call(unet)
    expected = diffusers_output(unet, call)
    asked: list[bool] = []

    def host() -> Tensor:
        asked.append(True)
        return expected * float("nan")

    with caplog.at_level(logging.WARNING, "onediff"), torch.no_grad():
        for _ in range(2):
            assert relative_error(runtime.run(unet, call, host), expected) < 1e-5
    assert len(caplog.messages) == 1 and "used without a comparison" in caplog.messages[0]
    (entry,) = runtime.table.entries()
    assert entry.state is State.PROVED and entry.relative_error is None
    runtime.release(unet)
